"""PyTorch modules written at random: statements over matrices of one shape, with odd ops inside.

Nothing is changed in them afterwards: as source, most mutants would only be syntax errors.
"""

import random
from collections.abc import Sequence

_HEAD = """import torch
from torch import nn
import torch.nn.functional as F


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, scale=1.0, *, flag=True):
        return {"x": self.a(x) * scale, "y": (self.b(x), [x])}


"""

# Attributes of the module; {n} is a number from 1 to 16, often one that fits.
_PARTS = """\
self.{v} = nn.Linear(8, {n})
self.{v} = nn.Linear({n}, 8, bias=False)
self.{v} = nn.Parameter(torch.randn(8, 8)[:, ::2].repeat(1, 2))
self.{v} = nn.Parameter(torch.empty(2**18, 2**18, device='meta'))
self.register_buffer('{v}', torch.tril(torch.ones(8, 8)))
self.register_buffer('{v}', torch.zeros(2, 8), persistent=False)
self.register_buffer('{v}', None)
self.{v} = nn.ModuleList([nn.Linear(8, 8)] * {n})
self.{v} = nn.ParameterDict({{'a b': nn.Parameter(torch.ones(8))}})
self.{v} = self.tied = self.lin
self.lin2.weight = self.lin.weight
self.emb.weight = self.lin.weight
self.lin2.weight = nn.Parameter(self.lin.weight.t())
self.lin2.weight.data = self.w.data
setattr(self, 'a b', nn.Linear(8, 8))
self.{v} = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
self.lin2 = self.lin2.to(torch.bfloat16)
self.lin2.requires_grad_(False)
self.{v} = [nn.Linear(8, 8)]
self.{v} = torch.ones(8)
self.lin = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(8, 8)))
self.lin2 = torch.jit.script(nn.Linear(8, 8))
self.lin2 = torch.compile(nn.Linear(8, 8))
self.lin2 = nn.DataParallel(nn.Linear(8, 8))
self.lin2.register_forward_hook(lambda m, i, o: o * 2)
""".splitlines()

# Values of shape [2, 8]; {a} and {b} are such values, maybe the same one.
_VALUES = """\
self.lin({a})
self.lin2({a})
self.lin({a}) + self.lin({b})
{a} @ self.w
torch.addmm({a}, {b}, self.w)
torch.addmm({a}, {a}, self.w.t())
torch.addmm({a}, self.w[:2], self.w)
torch.baddbmm({a}[None], {b}[None], self.w[None])[0]
torch.einsum('ij,ij->ij', {a}, {a})
torch.einsum('ij,kj->ik', {a}, {b}) @ {a}
torch.einsum('ij,ij,ij->ij', {a}, {b}, {a})
torch.bmm({a}[None], self.w[None])[0]
F.scaled_dot_product_attention({a}[None, None], {a}[None, None], {a}[None, None])[0, 0]
F.scaled_dot_product_attention({a}[None], {b}[None], {b}[None], is_causal=True)[0]
self.mha({a}[None], {b}[None], {a}[None])[0][0]
self.mha({a}, {a}, {a})[0]
torch.cat([{a}, {b}], 1)[:, ::2]
torch.cat([{a}, {a}])[1:3]
torch.stack([{a}, {b}, {a}]).mean(0)
torch.where({a} > 0, {a}, {b})
{a}.view(2, 2, 4).transpose(1, 2).reshape(2, 8)
{a}.t().contiguous().t()
{a}.as_strided((2, 8), (1, 1))
{a}.expand(3, 2, 8)[1]
{a}.unfold(1, 4, 4).reshape(2, 8)
{a}.chunk(2, 1)[0].repeat(1, 2)
torch.cat({a}.split([3, 5], 1)[::-1], 1)
sum({a}[None].unbind(0))
{a}.flip(1).roll(3, 1)
{a}.diagonal().sum() + {b}
{a}[[1, 0]]
{a}[:, torch.tensor([0] * 8)]
{a}[..., None].squeeze(-1)
{a}.gather(1, torch.zeros(2, 8, dtype=torch.long))
{a}.index_select(0, torch.tensor([0, 0]))
{a}.scatter_add(1, torch.zeros(2, 8, dtype=torch.long), {b})
{a}.masked_fill({b} > 0, -torch.inf)
{a}.index_put((torch.tensor([0]),), {b}[:1])
{a}.clone().add_({b})
{a}.sort(1)[0]
{a}.topk(8)[0]
{a}.cumsum(1)
{a}.softmax(-1)
F.layer_norm({a}, (8,), self.w[0], self.w[0])
F.rms_norm({a}, (8,))
F.gelu({a})
F.group_norm({a}, 4)
self.bn({a})
F.dropout({a}, 0.5, True)
F.rrelu({a}, training=True)
self.conv({a}.reshape(1, 1, 4, 4)).sum() + {a}
self.rnn({a})[0]
self.rnn({a}[None])[0][0]
self.cell({a})[0]
self.cell({a}, ({b}, {a}))[1]
nn.GRUCell(8, 8)({a}, {b})
self.emb({a}.long().clamp(0, 7)).sum(1)
self.emb({a}.argmax(1))
F.embedding_bag(torch.zeros(2, 3, dtype=torch.long), self.w)
F.one_hot({a}.argmax(1), 8) * {a}
F.interpolate({a}[None], scale_factor=2)[0, :, ::2]
F.pad({a}, (1, 1))[:, 1:-1]
F.conv1d({a}[None], self.w[:2, None, :1].expand(2, 2, 1))[0]
F.max_pool1d({a}[None], 1)[0]
F.conv_transpose1d({a}[None], self.w[:2, :2, None])[0]
F.cross_entropy({a}, {b}.argmax(1)) + {a}
torch.fft.irfft(torch.fft.rfft({a}), 8)
torch.view_as_real(torch.complex({a}, {b}))[..., 0]
torch.view_as_complex({a}.view(2, 4, 2)).abs().repeat(1, 2)
torch.outer({a}[0], {b}[1])[:2]
torch.linalg.qr(self.w)[0][:2]
torch.linalg.solve(self.w, {a}.t()).t()
torch.linalg.svd(self.w)[0][:2] + {a}
torch.linalg.inv(self.w)[:2]
torch.kron({a}, {b})[:2, :8]
torch.cdist({a}, {b}) @ {a}
torch.matrix_power(self.w, 3)[:2]
torch.logsumexp({a}, 1)[:, None] + {b}
torch.meshgrid({a}[0], {b}[0], indexing='ij')[0][:2]
torch.histc({a}, 8) + {b}
torch.bucketize({a}, self.w[0]).float()
torch.searchsorted({a}, {b}).float()
torch.arange(8) + {a}
torch.randn(2, 8) + {a}
torch.randn_like({a})
torch.bernoulli({a}.sigmoid())
torch.multinomial({a}.softmax(1), 8) * {b}
torch.empty(2, 8).copy_({a})
torch.full_like({a}, 3)
torch.tensor(3.0) * {a}
{a} * 2**40
{a} / 0
{a} // 0.0
{a}.pow(-0.5)
{a} % 3
{a}.double().float()
{a}.half().float()
{a}.to(torch.bfloat16).float()
{a}.bool().float()
{a}.to(torch.int8).float()
{a}.to(torch.float8_e4m3fn).float()
{a}.view(torch.int32).view(torch.float32)
{a}.to('meta')
{a}.to('cpu')
{a}.detach()
{a}.requires_grad_()
{a}.data
{a}[:0].sum() + {b}
torch.zeros(0, 8).sum() + {a}
torch.cat([{a}[:0], {b}])
{a}.sum() * {b}
{a}.shape[0] * {a}
{a}.new_zeros({a}.shape) + {b}
{a}.std(unbiased=True) * {b}
{a}.quantile(0.5) + {b}
{a}.median() + {b}
{a} + {b}[{b} > 0].sum()
{a} + torch.nonzero({b}).sum()
{a} + torch.unique({b}).sum()
torch.masked_select({a}, {a} > 0).mean() + {b}
{a}[{b}[:, 0] > 0].sum(0) + {a}
{a} * {b}.sum().item()
torch.repeat_interleave({a}, torch.tensor([1, 1]), 0)
{a}.argwhere().float().mean() * {b}
{a}.to_sparse().to_dense()
torch.sparse.mm(self.w.to_sparse(), {a}.t()).t()
{a}.to_sparse_csr() @ self.w
torch.nested.nested_tensor([{a}, {b}]).to_padded_tensor(0.0)[0]
torch.from_numpy({a}.numpy())
torch.quantize_per_tensor({a}, 0.1, 0, torch.qint8).dequantize()
torch.fake_quantize_per_tensor_affine({a}, 0.1, 0, -128, 127)
Square.apply({a})
torch.utils.checkpoint.checkpoint(self.lin, {a}, use_reentrant=False)
torch.vmap(self.lin)({a})
torch.func.grad(lambda v: v.sin().sum())({a})
torch.autograd.functional.jvp(torch.sin, {a}, {b})[1]
torch.cond({a}.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), ({b},))
torch.cond({a}.sum() > 0, lambda v: self.lin(v), lambda v: v @ self.w, ({a},))
torch._higher_order_ops.while_loop(lambda v: v.sum() < 9, lambda v: (v + 1,), ({a},))[0]
torch._higher_order_ops.scan(lambda c, v: (c + v, c * v), {a}[0], {b})[1]
torch._higher_order_ops.associative_scan(torch.add, {a}, 0)
torch.compile(torch.sin)({a})
self.inner({a})['x']
self.inner({a}, 2.0, flag=False)['y'][0]
self.inner({a})['y'][1][0]
torch.ops.aten.sin.default({a})
torch.special.i0({a})
torch.erfinv({a})
{a}.bfloat16() @ self.w.bfloat16()
torch.block_diag({a}, {b})[:2, :8]
torch.tensordot({a}, self.w, 1)
torch.cross({a}[:, :3], {b}[:, :3], 1).repeat(1, 3)[:, :8]
F.grid_sample({a}[None, None], torch.zeros(1, 2, 8, 2))[0, 0]
F.fold({a}.reshape(1, 4, 4), (2, 2), (2, 2)).repeat(1, 1, 1, 4).reshape(2, 8)[:2]
F.ctc_loss({a}.log_softmax(1)[:, None], torch.ones(1, 1, dtype=torch.long), [2], [1]) + {a}
F.pixel_shuffle({a}.reshape(1, 4, 2, 2), 2).reshape(1, 16).view(2, 8)
F.unfold({a}[None, None], (1, 1)).reshape(2, 8)
torch.bincount({a}.long().abs().flatten(), minlength=8)[:8] + {b}
torch.combinations({a}[0], 2)[:8, 0] + {b}
""".splitlines()

_STATEMENTS = """\
{a} += {b}
{a}[:, :2] = 0
{a}[{b} > 0] = 1
{a}.relu_()
{a}.t_()
{a}.mul_({a})
{a}.copy_({b})
{a}.view(-1)[3] = 7
{a}.fill_(2).sub_({b})
self.w.data.add_(1)
self.mask.add_(1)
self.mask.copy_(self.mask * 2)
self.held = {a}
print('out', {a}.shape)
assert {a}.sum() > 0
torch._check({a}.shape[0] == 2)
raise KeyError('a\\nb')
import sys; sys.exit(3)
self.lin.weight = self.w
torch.manual_seed(0)
{a}.resize_(3, 8)
{a} = {a}.set_({b})
torch._assert({a}.sum() > 0, 'no')
{a} = {a} + 1 if {a}.sum() > 0 else {b}
{a}, {b} = {b}, {a}
{a} = [{a}] * 3; {a} = {a}[0]
for i in range(int({a}.abs().sum().item()) % 3): {a} = self.lin({a})
torch.add({a}, {b}, out={a})
for i in range({n}): {a} = {a} * i
with torch.no_grad(): {a} = self.lin({a})
with torch.autocast('cpu', torch.bfloat16): {a} = self.lin({a}).float()
""".splitlines()

_RESULTS = """\
{a}
{a}, {b}
({a}, {a})
[{a}, ({b}, None)]
{{'logits': {a}, 'a b': [{b}, x]}}
x
self.w
x, self.w
{a}, 3, 'text', None
None
{a}.sum()
{a}.shape
()
{a} > 0
{a}[:0]
{a}.argmax()
{a}.to_sparse()
{a}.view(4, 4), {a}.t()
torch.unique({a})
{a}.sum().item()
1.5
torch.return_types.max(({a}, {b}))
{a}.max(1)
self
iter([{a}])
{a}.numpy()
{a}.double()
""".splitlines()

_INPUTS = """\
(torch.randn(2, 8),)
(torch.randn(2, 8).to('meta'),)
{'x': torch.randn(2, 8)}
torch.randn(2, 8)
(torch.randn(8)[None].expand(2, 8),)
(torch.randn(8, 2).t(),)
(torch.randn(2, 8).requires_grad_(),)
(torch.zeros(2, 8, dtype=torch.long),)
(torch.randn(3, 8),)
()
(1,)
(None,)
[torch.randn(2, 8)]
(torch.randn(0, 8),)
(torch.randn(2, 8).half(),)
(torch.tensor(1.0),)
(torch.randn(2, 8), torch.randn(2, 8))
{'y': torch.randn(2, 8)}
(torch.randn(2, 8).to_sparse(),)
({'a': torch.randn(2, 8)},)
(torch.nn.Parameter(torch.randn(2, 8)),)
""".splitlines()

_OPTIONS = """\
{'name': 'a\\nb\\x1b[31m<script>'}
{'name': 3}
{'held': ('x',)}
{'held': 'x'}
{'held': 3}
{'other': 1}
{'dynamic_shapes': {'x': {0: torch.export.Dim('n', min=1, max=9)}}}
{'dynamic_shapes': {'x': {0: torch.export.Dim.AUTO}}}
{'dynamic_shapes': 3}
{'kwargs': {'y': 1}}
{'kwargs': 3}
3
{'optimizer': 'sgd', 'loss': lambda y: y.sum()}
{'optimizer': 'adamw', 'loss': lambda y: y[0].sum()}
{'optimizer': torch.optim.RMSprop, 'loss': lambda y: y.mean()}
{'optimizer': None, 'loss': lambda y: y.sum()}
{'optimizer': 'adam'}
{'optimizer': 'none'}
{'loss': lambda y: y.sum()}
{'optimizer': 'momentum', 'loss': lambda y: y}
{'optimizer': 'sgd', 'loss': 'mse'}
{}
""".splitlines()

PLAIN = (
    _HEAD
    + """class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return self.lin(x)


def f():
    return M(), (torch.randn(2, 8),)
"""
)


# What torch.export mostly refuses: often enough, but not in most modules.
_RARE = (
    ".item()", "numpy", "nested", "associative_scan", "ctc_loss", "> 0]", "> 0 else", "nonzero",
    "unique", "argwhere", "masked_select", "sparse", "resize_", "raise", "exit", "set_(", "out=",
    "assert {a}", "quantize", "combinations", "histc", "bincount", ".to('meta')", "requires_grad_",
    "torch.compile", "_assert", "self.held", "[{a}] * 3",
)  # fmt: skip


def _drawn(templates: Sequence[str], rng: random.Random) -> str:
    """One of the templates, one in ten of the rare ones that are drawn."""
    while True:
        template = rng.choice(templates)
        if not any(part in template for part in _RARE) or rng.random() < 0.1:
            return template


def any_module(rng: random.Random) -> str:
    """The source of a module `M` and of a function `f` that returns it with example inputs."""
    parts = [
        "self.lin, self.lin2, self.conv = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(1, 2, 3)",
        "self.rnn, self.cell, self.emb = nn.LSTM(8, 8), nn.LSTMCell(8, 8), nn.Embedding(8, 8)",
        "self.w, self.bn, self.inner = nn.Parameter(torch.randn(8, 8)), nn.BatchNorm1d(8), Inner()",
        "self.mha = nn.MultiheadAttention(8, 2)",
        "self.register_buffer('mask', torch.ones(8, 8))",
    ]
    for i in range(rng.choice((0, 0, 1, 2))):
        parts.append(rng.choice(_PARTS).format(v=f"p{i}", n=rng.choice((8, 8, 1, 3, 16))))
    values, body = ["x"], []
    for _ in range(rng.choice((1, 2, 3, 4, 6, 10))):
        if rng.random() < 0.15:
            statement = _drawn(_STATEMENTS, rng)
        else:
            statement = f"v{len(values)} = {_drawn(_VALUES, rng)}"
        body.append(_filled(statement, values, rng))
        if statement.startswith("v"):
            values.append(f"v{len(values)}")
    result = rng.choice(_RESULTS) if rng.random() < 0.15 else "{a}"
    body.append(f"return {_filled(result, values[-1:] if result == '{a}' else values, rng)}")
    mode = rng.choice(("M().eval()",) * 8 + ("M()", "M()", "M().to('meta')", "M().half()"))
    returned = [mode, rng.choice(_INPUTS) if rng.random() < 0.15 else _INPUTS[0]]
    if rng.random() < 0.15:
        returned.append(rng.choice(_OPTIONS))
    return "".join([
        _HEAD, "class M(nn.Module):\n    def __init__(self):\n        super().__init__()\n",
        *(f"        {line}\n" for line in parts), "\n    def forward(self, x):\n",
        *(f"        {line}\n" for line in body),
        f"\n\ndef f():\n    return {', '.join(returned)}\n",
    ])  # fmt: skip


def _filled(template: str, values: list[str], rng: random.Random) -> str:
    """The template over recent values mostly, so that modules are deep as well as wide."""
    a, b = (rng.choice(values[-3:] if rng.random() < 0.8 else values) for _ in range(2))
    return template.format(a=a, b=b, n=rng.randrange(4))
