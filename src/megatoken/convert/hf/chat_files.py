"""What an exported chat model needs beside transformers' own files: ollama's Modelfile, and a README on serving it."""

from megatoken.data.chat_template import ChatTemplate

# The conversation as ollama writes it, in Go's template language.
_GO_TEMPLATES = {
    "chatml": "{{- range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n",
    "llama-3": "{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>\n\n{{ .Content }}<|eot_id|>"
    "{{ end }}<|start_header_id|>assistant<|end_header_id|>\n\n",
}
GGUF = "model.gguf"
# Of ollama's importers from safetensors those of LLaMA fit; others go through llama.cpp's converter.
IMPORTED = ("llama",)


MARKED = "chat_template_training.jinja"
MARKS = (
    "{% generation %}",
    "{% endgeneration %}",
)  # of transformers' assistant masks; plain jinja2 refuses them


def drop_marks(template: ChatTemplate) -> str:
    """The template for servers, some of which (llama-cpp-python) do not know transformers' marks."""
    jinja = template.jinja
    for mark in MARKS:
        jinja = jinja.replace(mark, "")
    return jinja


def describe_chat(template: ChatTemplate, model_type: str) -> dict[str, str]:
    """The contents of Modelfile, README.md and MARKED, the template with marks. model_type: that of config.json."""
    stops = [template.tokenizer.decode([id]) for id in template.stop_ids]
    is_imported = model_type in IMPORTED
    lines = [
        "FROM ." if is_imported else f"FROM ./{GGUF}",
        f'TEMPLATE """{_GO_TEMPLATES[template.name]}"""',
    ]
    modelfile = "\n".join([*lines, *(f'PARAMETER stop "{stop}"' for stop in stops)]) + "\n"
    convert = "" if is_imported else f"python llama.cpp/convert_hf_to_gguf.py . --outfile {GGUF}\n"
    ends = " and ".join(f"`{stop}`" for stop in stops)
    readme = f"""\
# A chat model

The chat template, {template.name}, is in tokenizer_config.json; the tokens that end an answer, {ends},
are in generation_config.json. To serve it, in this folder:

```
vllm serve .
{convert}ollama create mine -f Modelfile && ollama run mine
```

{MARKED} is the template with the marks that `apply_chat_template(..., return_assistant_tokens_mask=True)`
and trl's `assistant_only_loss` need; plain jinja2 does not know them.

**What a user writes can be taken for the template.** transformers, vLLM, llama.cpp and ollama write a conversation as
one text, and read control tokens out of all of it: a message that spells `{stops[0]}` ends itself, and what follows can
pose as the system or the assistant. Where users are not to be trusted, take such spellings out of their messages before
the server gets them. `megatoken chat` and `megatoken serve` take control tokens from the template alone.
"""
    return {"Modelfile": modelfile, "README.md": readme, MARKED: template.jinja}
