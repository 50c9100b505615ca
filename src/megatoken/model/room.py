"""Where the implementations of the model's operations are (base/rooms.py, model/kernels)."""

ENTRIES = {
    "attention": {
        "explicit": "megatoken.model.kernels.attention:explicit_attention",
        "flash": "megatoken.model.kernels.attention:flash_attention",
        "blocked": "megatoken.model.kernels.blocked:blocked_attention",
        "native": "megatoken.model.native.attention:native_attention",
        "cudnn": "megatoken.model.kernels.attention:cudnn_attention",
        "fa2": "megatoken.model.kernels.attention:fa2_attention",
    },
    "norm": {"layernorm": "megatoken.model.gpt:Norm", "rmsnorm": "megatoken.model.gpt:Norm"},
    "mlp": {
        "gelu": "megatoken.model.gpt:MLP",
        "gelu-erf": "megatoken.model.gpt:MLP",
        "relu2": "megatoken.model.gpt:MLP",
        "swiglu": "megatoken.model.gpt:MLP",
        "geglu": "megatoken.model.gpt:MLP",
    },
    "measure": {"parts": "megatoken.model.gpt:measure_parts"},
    "block": {"standard": "megatoken.model.gpt:Block"},
    "block_kernels": {
        "torch": "megatoken.model.kernels.block:KERNELS",
        "cublaslt": "megatoken.model.kernels.cublaslt:KERNELS",
        "torch+native": "megatoken.model.native.ops:KERNELS",
        "native": "megatoken.model.native.block:KERNELS",
        "int8": "megatoken.model.native.int8:KERNELS",
    },
    "loss_term": {
        "z": "megatoken.model.loss:z_loss",
        "smoothing": "megatoken.model.loss:label_smoothing",
    },
    "output_layer": {
        "torch": "megatoken.model.kernels.cross_entropy:OutputLayer",
        "triton": "megatoken.model.kernels.fused_loss:TritonLayer",
        "native": "megatoken.model.native.ops:NativeLayer",
        "torch fp8": "megatoken.model.kernels.fp8:FP8Layer",
        "triton fp8": "megatoken.model.kernels.fused_loss:FP8TritonLayer",
    },
}
