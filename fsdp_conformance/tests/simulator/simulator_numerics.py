"""
Modules and operations whose results on the simulated accelerator are compared with the CPU's.

Each is a function of a type of device. It makes its inputs on the CPU from the seed that was set, moves them, computes,
and returns tensors and numbers: results, gradients of inputs and parameters, buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: What a computation returns.
Results = list[Any]
Computation = Callable[[str], Results]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def training(
    make: Callable[[], nn.Module],
    *shapes: Sequence[int],
    train: bool = True,
    dtype: torch.dtype = torch.float32,
    indices: tuple[int, Sequence[int]] | None = None,
) -> Computation:
    """Forward and backward of a module; `indices`: an upper bound and a shape, for the first input."""

    def compute(device_type: str) -> Results:
        module = make().to(device_type).to(dtype).train(train)
        inputs = [torch.randn(shape).to(dtype).to(device_type).requires_grad_() for shape in shapes]
        first = [] if indices is None else [torch.randint(0, indices[0], indices[1]).to(device_type)]
        results = flat(module(*first, *inputs))
        loss = sum((result.float() * torch.randn(result.shape).to(device_type)).sum() for result in results)
        assert isinstance(loss, Tensor), "there is a result"
        loss.backward()
        grads = [tensor.grad for tensor in [*inputs, *module.parameters()] if tensor.grad is not None]
        return [*results, *grads, *module.buffers()]

    return compute


def elementwise(activation: nn.Module) -> Computation:
    return training(lambda: activation, (4, 18))


def flat(value: Any) -> list[Tensor]:
    """The tensors in nested tuples."""
    if isinstance(value, Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in flat(part)]


def attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Apply(lambda query, key, value: F.scaled_dot_product_attention(query, key, value, **options))


def masked_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


IMAGE = (2, 3, 9, 9)
HEADS = ((2, 3, 5, 8),) * 3  # query, key, value: batch, heads, sequence, features
SEQUENCE = (6, 3, 5)  # sequence, batch, features

MODULES: dict[str, Computation] = {
    "linear": training(lambda: nn.Linear(5, 7), (3, 5)),
    "linear of a sequence": training(lambda: nn.Linear(5, 7), (2, 3, 5)),
    "linear of an image": training(lambda: nn.Linear(5, 7), (2, 2, 3, 5)),
    "linear without bias": training(lambda: nn.Linear(5, 7, bias=False), (2, 3, 5)),
    "linear in bf16": training(lambda: nn.Linear(16, 32), (4, 16), dtype=torch.bfloat16),
    "linear in fp64": training(lambda: nn.Linear(5, 7), (3, 5), dtype=torch.float64),
    "bilinear": training(lambda: nn.Bilinear(5, 4, 7), (3, 5), (3, 4)),
    "conv1d": training(lambda: nn.Conv1d(3, 6, 3, padding=1), (2, 3, 9)),
    "conv2d": training(lambda: nn.Conv2d(3, 6, 3, stride=2, padding=1), IMAGE),
    "conv2d in groups": training(lambda: nn.Conv2d(4, 8, 3, groups=2, dilation=2), (2, 4, 9, 9)),
    "conv2d, circular": training(lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d in bf16": training(lambda: nn.Conv2d(3, 6, 3), IMAGE, dtype=torch.bfloat16),
    "conv3d": training(lambda: nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5)),
    "transposed conv2d": training(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 5, 5)),
    "layer norm": training(lambda: nn.LayerNorm(17), (4, 17)),
    "rms norm": training(lambda: nn.RMSNorm(17), (4, 17)),
    "group norm": training(lambda: nn.GroupNorm(2, 6), (4, 6, 5)),
    "batch norm": training(lambda: nn.BatchNorm1d(6), (4, 6)),
    "batch norm of images": training(lambda: nn.BatchNorm2d(3), IMAGE),
    "batch norm in evaluation": training(lambda: nn.BatchNorm2d(3), IMAGE, train=False),
    "instance norm": training(lambda: nn.InstanceNorm2d(3, affine=True), IMAGE),
    "dropout": training(lambda: nn.Dropout(0.1), (40, 17)),
    "dropout of channels": training(lambda: nn.Dropout2d(0.3), IMAGE),
    "alpha dropout": training(lambda: nn.AlphaDropout(0.3), (4, 17)),
    "rrelu": training(nn.RReLU, (4, 17)),
    "embedding": training(lambda: nn.Embedding(11, 5, padding_idx=2), indices=(11, (4, 6))),
    "embedding bag": training(lambda: nn.EmbeddingBag(11, 5), indices=(11, (4, 6))),
    "embedding bag, maximum": training(lambda: nn.EmbeddingBag(11, 5, mode="max"), indices=(11, (4, 6))),
    **{
        type(activation).__name__: elementwise(activation)
        for activation in (
            nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Mish(), nn.Softmax(-1), nn.LogSoftmax(0), nn.Softplus(), nn.Hardswish(),
            nn.GLU(), nn.LeakyReLU(), nn.ELU(), nn.CELU(), nn.SELU(), nn.Tanh(), nn.Sigmoid(), nn.LogSigmoid(),
            nn.Softsign(), nn.Threshold(0.1, 20),
        )
    },
    "gelu, by tanh": training(lambda: nn.GELU("tanh"), (4, 17)),
    "prelu": training(nn.PReLU, (4, 17)),
    "max pool": training(lambda: nn.MaxPool2d(2), IMAGE),
    "average pool": training(lambda: nn.AvgPool2d(3, 2), IMAGE),
    "adaptive average pool": training(lambda: nn.AdaptiveAvgPool2d(3), IMAGE),
    "adaptive max pool": training(lambda: nn.AdaptiveMaxPool2d(3), IMAGE),
    "upsampling, bilinear": training(lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "upsampling, nearest": training(lambda: nn.Upsample(scale_factor=2), IMAGE),
    "reflection pad": training(lambda: nn.ReflectionPad2d(1), IMAGE),
    "pixel shuffle": training(lambda: nn.PixelShuffle(2), (2, 8, 3, 3)),
    "unfold": training(lambda: nn.Unfold(2), IMAGE),
    "rnn": training(lambda: nn.RNN(5, 7, 2), SEQUENCE),
    "gru, both directions": training(lambda: nn.GRU(5, 7, 2, bidirectional=True), SEQUENCE),
    "lstm": training(lambda: nn.LSTM(5, 7, 2), SEQUENCE),
    "lstm, both directions": training(lambda: nn.LSTM(5, 7, bidirectional=True, batch_first=True), SEQUENCE),
    "lstm with projections": training(lambda: nn.LSTM(5, 7, proj_size=3), SEQUENCE),
    "lstm with dropout": training(lambda: nn.LSTM(5, 7, 2, dropout=0.2), SEQUENCE),
    "lstm cell": training(lambda: nn.LSTMCell(5, 7), (6, 5)),
    "gru cell": training(lambda: nn.GRUCell(5, 7), (6, 5)),
    "attention of heads": training(lambda: nn.MultiheadAttention(8, 2, batch_first=True), *[(2, 5, 8)] * 3),
    "attention": training(attention(), *HEADS),
    "attention, causal": training(attention(is_causal=True), *HEADS),
    "attention with dropout": training(attention(dropout_p=0.2), *HEADS),
    "attention with a mask": training(lambda: Apply(masked_attention), *HEADS),
    "attention of grouped queries": training(attention(enable_gqa=True), (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)),
    "attention in bf16": training(attention(is_causal=True), *HEADS, dtype=torch.bfloat16),
    "encoder layer": training(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    "encoder, norm first": training(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, norm_first=True), 2), (5, 2, 8)
    ),
    "decoder layer": training(lambda: nn.TransformerDecoderLayer(8, 2, 16), (5, 2, 8), (6, 2, 8)),
    "transformer": training(lambda: nn.Transformer(8, 2, 1, 1, 16), (5, 2, 8), (6, 2, 8)),
}  # fmt: skip


def encoder_layer_without_gradients(device_type: str) -> Results:
    """torch uses a single fused operation for it."""
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().to(device_type)
    with torch.no_grad():
        return [module(torch.randn(2, 5, 8).to(device_type))]


def losses(device_type: str) -> Results:
    """Loss functions, and the gradients of their inputs."""
    inputs = torch.randn(6, 5).to(device_type).requires_grad_()
    classes = torch.randint(0, 5, (6,)).to(device_type)
    targets = torch.randn(6, 5).to(device_type)
    weights = torch.rand(5).to(device_type)
    signs = torch.ones(6).to(device_type)
    values = [
        F.cross_entropy(inputs, classes),
        F.cross_entropy(inputs, classes, weight=weights, label_smoothing=0.1, ignore_index=2),
        F.mse_loss(inputs, targets),
        F.l1_loss(inputs, targets),
        F.smooth_l1_loss(inputs, targets),
        F.huber_loss(inputs, targets),
        F.binary_cross_entropy_with_logits(inputs, targets.sigmoid()),
        F.kl_div(inputs.log_softmax(-1), targets.softmax(-1), reduction="batchmean"),
        F.nll_loss(inputs.log_softmax(-1), classes),
        F.cosine_embedding_loss(inputs, targets, signs),
        F.triplet_margin_loss(inputs, targets, targets * 2),
        F.multi_margin_loss(inputs, classes),
        F.gaussian_nll_loss(inputs, targets, targets * targets + 1),
        F.poisson_nll_loss(inputs, targets),
    ]
    return [*values, *(torch.autograd.grad(loss, inputs)[0] for loss in values)]


def ctc_loss(device_type: str) -> Results:
    """CTC loss, with its lengths on the CPU."""
    inputs = torch.randn(7, 2, 5).log_softmax(-1).to(device_type).requires_grad_()
    targets = torch.tensor([[1, 2, 3], [2, 2, 4]]).to(device_type)
    loss = F.ctc_loss(inputs, targets, torch.tensor([7, 7]), torch.tensor([3, 3]))
    return [loss, torch.autograd.grad(loss, inputs)[0]]


def factories(device_type: str) -> Results:
    """Factories."""
    options: dict[str, Any] = {"device": device_type}
    return [
        torch.arange(7, **options), torch.arange(0, 1, 0.1, **options), torch.linspace(0, 1, 5, **options),
        torch.eye(3, 4, **options), torch.full((2, 3), 5.0, **options), torch.ones(3, dtype=torch.int8, **options),
        torch.zeros(2, 0, 3, **options), torch.tril_indices(3, 3, **options), torch.tensor([[1, 2], [3, 4]], **options),
        torch.logspace(0, 2, 3, **options), torch.hann_window(6, **options), torch.scalar_tensor(3.0, **options),
    ]  # fmt: skip


def random_numbers(device_type: str) -> Results:
    """Every way to draw random numbers after one seed, with CPU tensors in between."""
    options: dict[str, Any] = {"device": device_type}
    values = torch.randn(4, 5).to(device_type)
    return [
        torch.rand(5, **options), torch.randn(5, **options), torch.randint(0, 9, (5,), **options),
        torch.randperm(9, **options), torch.randn(3), torch.rand_like(values), torch.bernoulli(values.sigmoid()),
        torch.normal(values, values.abs()), torch.poisson(values.abs()), torch.multinomial(values.softmax(-1), 2),
        *(
            getattr(torch.empty(9, **options), name)(*arguments)
            for name, *arguments in (
                ("exponential_",), ("uniform_", -1, 1), ("normal_", 2, 3), ("random_", 5), ("geometric_", 0.3),
                ("cauchy_",), ("log_normal_",), ("bernoulli_", 0.3),
            )
        ),
        F.gumbel_softmax(values, hard=True), torch.nn.init.trunc_normal_(torch.empty(6, **options)),
    ]  # fmt: skip


def reductions(device_type: str) -> Results:
    a = torch.randn(4, 5, 6).to(device_type)
    return [
        a.sum(), a.sum(1), a.sum(dtype=torch.float64), a.mean(-1), a.var(0), a.std(), a.norm(), a.prod(1), a.amax(2),
        torch.linalg.vector_norm(a, dim=1), a.median(1).values, a.mode(1).values, a.kthvalue(2).values, a.argmax(-1),
        a.cumsum(1), a.cumprod(1), a.cummax(1).values, a.logcumsumexp(1), a.logsumexp(1), a.aminmax()[0], a.any(),
        torch.quantile(a, 0.3), torch.histc(a, 5), torch.cov(a[0]), torch.trapezoid(a), torch.isnan(a).sum(),
        torch.empty(0, 5, device=device_type).sum(0), a.all().item(), a.tolist()[1][2][3], float(a.sum()), len(a),
        a.count_nonzero(), torch.equal(a, a), torch.allclose(a, a + 1), bool((a < 9).all()),
    ]  # fmt: skip


def indexing(device_type: str) -> Results:
    a = torch.randn(4, 5, 6).to(device_type)
    rows = torch.tensor([0, 2]).to(device_type)
    target = a.clone()
    target[1] = 3
    target[:, 2, :] += a[:, 1, :]
    target[a > 0] = -1
    target[rows, :, 1] = a[rows, :, 2]
    target.index_put_((rows,), a[:2], accumulate=True)
    target.masked_scatter_(a > 1, a)
    zeros = torch.zeros(4, 5, 6, device=device_type)
    index = torch.ones(4, 2, 6, dtype=torch.long, device=device_type)
    return [
        target, a[a > 0], a[:, [0, 2]], a[rows], a[..., None].expand(4, 5, 6, 2).contiguous(), a[1:3, ::2], a[:, -1],
        torch.where(a > 0, a, -a), torch.nonzero(a > 1), a.masked_select(a > 0), a.masked_fill(a < 0, 7),
        a.gather(1, index), zeros.scatter(1, index, a[:, :2]), zeros.scatter_add(1, index, a[:, :2]),
        zeros.scatter_reduce(1, index, a[:, :2], "amax"), a.index_select(1, rows), a.clone().index_add_(0, rows, a[:2]),
        a.clone().index_copy_(0, rows, a[:2]), a.index_fill(0, rows, 5), a.take(rows), a.take_along_dim(index, 1),
        a.clone().put_(rows, a[0, 0, :2]), torch.cat([torch.empty(0, device=device_type), a.view(-1)]),
    ]  # fmt: skip


def shapes(device_type: str) -> Results:
    """Views, and copies of views."""
    a = torch.randn(4, 5, 6).to(device_type)
    image = torch.randn(2, 3, 4, 4).to(device_type)
    flipped = a.transpose(0, 1)
    return [
        flipped + 1, flipped.reshape(-1), a.permute(2, 0, 1).contiguous(), a.flip(0), a.roll(1, 1), a.tril(),
        a.unfold(1, 2, 1), a.diagonal(0, 1, 2), a.chunk(2, 1)[1], a.split([2, 3], 1)[1], a.tensor_split(3, 1)[2],
        a.view(20, 6).as_strided((3, 2), (1, 4), 5), a.repeat(1, 2, 1), a.unsqueeze(0).squeeze(0), a.movedim(0, 2),
        a.view(torch.int32), torch.view_as_complex(a.view(4, 5, 3, 2)), F.pad(a, (1, 1)), torch.rot90(a),
        image.to(memory_format=torch.channels_last) * 2, image.to(memory_format=torch.channels_last).clone(),
        a.to(torch.bfloat16), a.to(torch.float16), a.int(), a.bool(), a.double(), torch.stack([a, a]),
        torch.meshgrid(a[0, 0], a[0, 1], indexing="ij")[0], torch.cat([a, a * 2], 1), torch.block_diag(a[0], a[1]),
        F.one_hot(torch.tensor([0, 2]).to(device_type)), a[0].clone().t_(), a[0].clone().resize_(7, 2)[:5],
        a.clone().unsqueeze_(0).squeeze_(),
    ]  # fmt: skip


def arithmetic(device_type: str) -> Results:
    a = torch.randn(4, 5, 6).to(device_type)
    b = torch.randn(4, 6, 3).to(device_type)
    c = torch.complex(a, a)
    return [
        a + 1, a * torch.tensor(2.0), torch.tensor(3.0, device=device_type) * a, 1 / a, a.pow(3), 2**a, a.exp(), a % 2,
        a.lerp(a * 2, 0.3), torch.addcmul(a, a, a, value=0.5), torch.addcdiv(a, a, a * a + 1, value=0.5), a // 0.3,
        a @ b, torch.einsum("bij,bjk->ik", a, b), torch.addmm(a[0, :, :3], a[0], b[0]), torch.clamp(a, -1, 1),
        torch.baddbmm(a[:, :, :3], a, b), torch.tensordot(a, b, ([0, 2], [0, 1])), torch.outer(a[0, 0], a[0, 1]),
        torch.kron(a[0], a[1]), torch.cdist(a, a), a.half() @ b.half(), a.bfloat16() @ b.bfloat16(),
        a[0].mv(b[0, :, 0]), a[0, 0].dot(a[0, 1]), c.conj() * 2, c.angle(), torch.polar(a.abs(), a),
        torch.nan_to_num(a / 0), torch.erfinv(a.tanh()), torch.special.i0(a), a.frexp()[0], torch.renorm(a, 2, 0, 1),
        F.normalize(a), F.cosine_similarity(a, a * 2, -1), torch.fft.fft(a), torch.fft.rfft(a).abs(),
        F.grid_sample(a[None], torch.rand(1, 3, 3, 2).to(device_type) * 2 - 1),
    ]  # fmt: skip


def sorting(device_type: str) -> Results:
    """Operations that search for values, whose results depend on the data in size."""
    a = torch.randn(4, 5, 6).to(device_type)
    edges = torch.arange(5.0, device=device_type)
    counts = torch.tensor([1, 0, 2]).to(device_type)
    return [
        *a.sort(-1), *a.topk(2), a.argsort(1), a.unique(), torch.unique(a.int(), return_counts=True)[1],
        torch.bincount(counts), torch.searchsorted(edges, a), torch.bucketize(a, edges), a.msort(),
        torch.repeat_interleave(counts, counts), torch.isin(a.int(), counts), torch.combinations(a[0, 0]),
    ]  # fmt: skip


def linear_algebra(device_type: str) -> Results:
    a = torch.randn(5, 6).to(device_type)
    square = a[:, :5]
    return [
        *torch.linalg.qr(a), torch.linalg.svd(a)[1], torch.linalg.inv(square), torch.linalg.eigh(square + square.T)[0],
        torch.linalg.cholesky(a @ a.T), torch.linalg.solve(square, a[:, 5]), torch.linalg.det(square),
        torch.linalg.matrix_norm(a), torch.triu(a), torch.linalg.matrix_exp(square),
        torch.linalg.eig(square)[0], torch.linalg.pinv(a),
    ]  # fmt: skip


def lists_of_tensors(device_type: str) -> Results:
    """The operations of optimizers and clipping, in-place and not."""
    a, b = ([torch.randn(shape).to(device_type) for shape in ((3, 5), (7,), (0,), ())] for _ in range(2))
    x = [tensor.clone() for tensor in a]
    torch._foreach_mul_(x, 2.0)
    torch._foreach_add_(x, b, alpha=0.3)
    torch._foreach_addcdiv_(x, a, [tensor * tensor + 1 for tensor in b], 0.1)
    torch._foreach_lerp_(x, b, 0.25)
    copies = [torch.empty_like(tensor) for tensor in a]
    torch._foreach_copy_(copies, a)
    return [
        *x,
        *copies,
        *torch._foreach_norm(a),
        *torch._foreach_sqrt(torch._foreach_abs(a)),
        *torch._foreach_div(a, 3),
    ]


def out_arguments(device_type: str) -> Results:
    """Empty, of the right shape, strided, of the wrong shape."""
    a, b = torch.randn(4, 5).to(device_type), torch.randn(5, 3).to(device_type)
    empty = torch.empty(0, device=device_type)
    right = torch.empty(4, 3, device=device_type)
    strided = torch.empty(3, 4, device=device_type).t()
    part = torch.zeros(9, 3, device=device_type)
    values, indices = torch.empty(0, device=device_type), torch.empty(0, dtype=torch.long, device=device_type)
    torch.add(a, a, out=empty)
    torch.mm(a, b, out=right)
    torch.mm(a, b, out=strided)
    torch.mm(a, b, out=part[2:6])
    torch.sort(a, out=(values, indices))
    none = torch.empty(0, 3, device=device_type)
    torch.mul(none, 2, out=torch.empty(0, 3, device=device_type))
    return [empty, right, strided, part, values, indices, none, torch.tensor(strided.stride())]


OPERATIONS: dict[str, Computation] = {
    function.__name__: function
    for function in (
        encoder_layer_without_gradients, losses, ctc_loss, factories, random_numbers, reductions, indexing, shapes,
        arithmetic, sorting, linear_algebra, lists_of_tensors, out_arguments,
    )
}  # fmt: skip


def results_of(compute: Computation, device_type: str) -> Results:
    """After the same seed on every device; tensors are brought to the CPU."""
    torch.manual_seed(29)
    return [result.detach().cpu() if isinstance(result, Tensor) else result for result in compute(device_type)]


def differences(expected: Results, actual: Results) -> list[str]:
    """The differences, bit for bit; NaN equals NaN."""
    texts = [] if len(expected) == len(actual) else [f"{len(actual)} results instead of {len(expected)}"]
    for i, (left, right) in enumerate(zip(expected, actual, strict=False)):
        if isinstance(left, Tensor):
            same = left.dtype == right.dtype and left.shape == right.shape and bits_of(left) == bits_of(right)
        else:
            same = left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))
        if not same:
            texts.append(f"result {i}: {right} instead of {left}")
    return texts


def bits_of(tensor: Tensor) -> bytes:
    """The bytes of all elements; every NaN is the same."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
