"""HSDAG's three models as ONNX files, from torch modules with random weights: to be executed.

The same configurations as `hsdag_graphs`, of which simulated tables are made. Needs the extra
`corpus`.
"""

from pathlib import Path
from typing import Any

from pretrain.profile_corpus.exports import Export, export, image, tokens, write

EXPORTED = {
    "resnet-50": Export("hsdag-resnet-50", "resnet", "ResNetConfig",
                        "ResNetForImageClassification", image(224), {"num_labels": 1000}),
    "bert-base": Export("hsdag-bert-base", "bert", "BertConfig", "BertModel", tokens(1, 8)),
}  # fmt: skip
MODELS = ("inception-v3", *EXPORTED)


def onnx_file(name: str, folder: Path) -> Path:
    """The file of a model, written to the folder unless it is there."""
    if name in EXPORTED:
        return export(EXPORTED[name], folder)
    path = folder / "hsdag-inception-v3.onnx"
    if not path.exists():
        import torch

        torch.manual_seed(0)
        write(inception_v3().eval(), (torch.randn(1, 3, 299, 299),), path)
    return path


def _conv(i: int, o: int, size: Any, stride: int = 1, same: bool = True) -> Any:
    """A convolution without bias, batch normalisation and ReLU."""
    from torch import nn

    size = (size, size) if isinstance(size, int) else size
    pad = tuple(s // 2 for s in size) if same else 0
    convolution = nn.Conv2d(i, o, size, stride, pad, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(o), nn.ReLU())


def _chain(i: int, *steps: tuple[int, Any]) -> Any:
    """Convolutions one after the other: channels and size of each."""
    from torch import nn

    widths = [i, *(o for o, _ in steps)]
    return nn.Sequential(*(_conv(a, *step) for a, step in zip(widths, steps, strict=False)))


def _pooled(i: int, o: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.AvgPool2d(3, 1, 1), _conv(i, o, 1))


def _joined(*branches: Any) -> Any:
    """Branches side by side, their channels behind each other."""
    import torch

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = torch.nn.ModuleList(branches)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([branch(x) for branch in self.branches], dim=1)

    return Joined()


def inception_v3() -> Any:
    """Inception-V3 (Szegedy et al. 2016, arXiv 1512.00567) without the auxiliary head."""
    from torch import nn

    def a(i: int, last: int) -> nn.Module:
        return _joined(_chain(i, (64, 1)), _chain(i, (48, 1), (64, 5)),
                      _chain(i, (64, 1), (96, 3), (96, 3)), _pooled(i, last))  # fmt: skip

    def c(k: int) -> nn.Module:
        wide, tall = (1, 7), (7, 1)
        return _joined(
            _chain(768, (192, 1)), _chain(768, (k, 1), (k, wide), (192, tall)),
            _chain(768, (k, 1), (k, tall), (k, wide), (k, tall), (192, wide)), _pooled(768, 192),
        )  # fmt: skip

    def e(i: int) -> nn.Module:
        def forked(o: int) -> nn.Module:
            return _joined(_conv(o, 384, (1, 3)), _conv(o, 384, (3, 1)))

        return _joined(
            _chain(i, (320, 1)), nn.Sequential(_chain(i, (384, 1)), forked(384)),
            nn.Sequential(_chain(i, (448, 1), (384, 3)), forked(384)), _pooled(i, 192),
        )  # fmt: skip

    def halved(*branches: nn.Module) -> nn.Module:
        return _joined(*branches, nn.MaxPool2d(3, 2))

    stem = [
        _conv(3, 32, 3, 2, False), _conv(32, 32, 3, 1, False), _conv(32, 64, 3), nn.MaxPool2d(3, 2),
        _conv(64, 80, 1), _conv(80, 192, 3, 1, False), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    first = halved(
        _conv(288, 384, 3, 2, False),
        nn.Sequential(_chain(288, (64, 1), (96, 3)), _conv(96, 96, 3, 2, False)),
    )
    second = halved(
        nn.Sequential(_conv(768, 192, 1), _conv(192, 320, 3, 2, False)),
        nn.Sequential(_chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))),
                      _conv(192, 192, 3, 2, False)),
    )  # fmt: skip
    return nn.Sequential(
        *stem, a(192, 32), a(256, 64), a(288, 64), first, c(128), c(160), c(160), c(192), second,
        e(1280), e(2048), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
    )  # fmt: skip
