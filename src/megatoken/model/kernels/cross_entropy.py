"""Cross-entropy of rows of logits, which are overwritten by their gradient: softmax minus one-hot.

Logits x may be capped first, to c tanh(x / c). This equals 2 c s - c with s = sigmoid(2 x / c),
which is much faster than tanh on a CPU, and the softmax ignores the -c. The gradient is then
multiplied by 4 s (1 - s). Columns from `vocab_size` on are padding, with neither probability nor
gradient. Rows without a target have no gradient.

Torch makes a few passes in fp32. Other implementations are subclasses of OutputLayer
(model/room.py).

Shapes: N rows, C d_model, V padded vocabulary.
"""

import torch
from torch import Tensor


def softmax_cross_entropy(
    logits_NV: Tensor, targets_N: Tensor, vocab_size: int, softcap: float = 0.0, *, overwrite: bool
) -> Tensor:
    """Return -log p (N,) of each row's target in nats, in fp32; 0 for negative targets.

    overwrite: whether to leave the gradient of the summed losses in `logits_NV`, whose content is
    otherwise undefined afterwards.
    """
    scores_NV = logits_NV.float()  # no copy if the logits are in fp32
    if softcap:
        sigmoid_NV = (scores_NV * (2 / softcap)).sigmoid_()
        torch.mul(sigmoid_NV, 2 * softcap, out=scores_NV)
    scores_NV[:, vocab_size:] = -torch.inf
    target_N1 = targets_N.clamp(min=0)[:, None]
    # In place: two passes over the rows. Separate log-sum-exp and softmax would take five.
    log_p_NV = torch.log_softmax(scores_NV, -1, out=scores_NV)
    loss_N = -log_p_NV.gather(1, target_N1).squeeze(1) * (targets_N >= 0)
    if overwrite:
        grad_NV = log_p_NV.exp_()
        grad_NV.scatter_add_(1, target_N1, torch.full_like(target_N1, -1, dtype=torch.float32))
        grad_NV.masked_fill_((targets_N < 0)[:, None], 0)
        if softcap:
            torch.ops.aten.sigmoid_backward.grad_input(grad_NV, sigmoid_NV, grad_input=grad_NV)
            grad_NV.mul_(4)
        if grad_NV.dtype != logits_NV.dtype:
            logits_NV.copy_(grad_NV)
    return loss_N


def torch_matmul(
    a_MK: Tensor, b_KN: Tensor, out: Tensor | None = None, *, accumulate: bool = False
) -> Tensor:
    """Return the matmul of a and b, written to `out` if given.

    out: may have a wider dtype. accumulate: whether to add to `out` instead of overwriting it.
    """
    if out is not None and out.dtype != a_MK.dtype:
        if a_MK.is_cuda:  # the matmul adds to `out` in one pass
            return torch.addmm(
                out, a_MK, b_KN, out_dtype=out.dtype, beta=float(accumulate), out=out
            )
        return out.add_(a_MK @ b_KN) if accumulate else out.copy_(a_MK @ b_KN)
    if accumulate and out is not None:
        return torch.addmm(out, a_MK, b_KN, out=out)
    return torch.mm(a_MK, b_KN, out=out)


class OutputLayer:
    """The output layer and the softmax of some rows, called by `cross_entropy` for chunks of them.

    h_NC, w_VC: hidden states and weight, in the dtype of the products. trains: whether gradients
    are needed.
    """

    softmax = staticmethod(softmax_cross_entropy)
    matmul = staticmethod(torch_matmul)

    def __init__(self, h_NC: Tensor, w_VC: Tensor, *, trains: bool) -> None:
        self.h_NC = h_NC
        self.w_VC = w_VC
        self.trains = trains

    def project(self, rows: slice, out_NV: Tensor) -> None:
        """Write the logits of some rows to `out_NV`."""
        self.matmul(self.h_NC[rows], self.w_VC.T, out_NV)

    def grad_hidden(self, grad_NV: Tensor, out_NC: Tensor) -> None:
        """Write the gradient of the hidden states, given that of the logits, to `out_NC`."""
        self.matmul(grad_NV, self.w_VC, out_NC)
