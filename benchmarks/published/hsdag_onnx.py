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


def inception_v3() -> Any:
    """Inception-V3 (Szegedy et al. 2016, arXiv 1512.00567) without the auxiliary head."""
    import torch
    from torch import nn

    def conv(i: int, o: int, size: Any, stride: int = 1, same: bool = True) -> nn.Module:
        size = (size, size) if isinstance(size, int) else size
        pad = tuple(s // 2 for s in size) if same else 0
        return nn.Sequential(nn.Conv2d(i, o, size, stride, pad, bias=False), nn.BatchNorm2d(o),
                             nn.ReLU())  # fmt: skip

    def chain(i: int, *steps: tuple[int, Any]) -> nn.Module:
        widths = [i, *(o for o, _ in steps)]
        return nn.Sequential(*(conv(a, *step) for a, step in zip(widths, steps, strict=False)))

    class Joined(nn.Module):
        """Branches side by side, their channels behind each other."""

        def __init__(self, *branches: nn.Module) -> None:
            super().__init__()
            self.branches = nn.ModuleList(branches)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([branch(x) for branch in self.branches], dim=1)

    def pooled(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(i, o, 1))

    def a(i: int, last: int) -> nn.Module:
        return Joined(chain(i, (64, 1)), chain(i, (48, 1), (64, 5)),
                      chain(i, (64, 1), (96, 3), (96, 3)), pooled(i, last))  # fmt: skip

    def c(k: int) -> nn.Module:
        wide, tall = (1, 7), (7, 1)
        return Joined(
            chain(768, (192, 1)), chain(768, (k, 1), (k, wide), (192, tall)),
            chain(768, (k, 1), (k, tall), (k, wide), (k, tall), (192, wide)), pooled(768, 192),
        )  # fmt: skip

    def e(i: int) -> nn.Module:
        def forked(o: int) -> nn.Module:
            return Joined(conv(o, 384, (1, 3)), conv(o, 384, (3, 1)))

        return Joined(
            chain(i, (320, 1)), nn.Sequential(chain(i, (384, 1)), forked(384)),
            nn.Sequential(chain(i, (448, 1), (384, 3)), forked(384)), pooled(i, 192),
        )  # fmt: skip

    def halved(*branches: nn.Module) -> nn.Module:
        return Joined(*branches, nn.MaxPool2d(3, 2))

    stem = [
        conv(3, 32, 3, 2, False), conv(32, 32, 3, 1, False), conv(32, 64, 3), nn.MaxPool2d(3, 2),
        conv(64, 80, 1), conv(80, 192, 3, 1, False), nn.MaxPool2d(3, 2),
    ]  # fmt: skip
    first = halved(
        conv(288, 384, 3, 2, False),
        nn.Sequential(chain(288, (64, 1), (96, 3)), conv(96, 96, 3, 2, False)),
    )
    second = halved(
        nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, 2, False)),
        nn.Sequential(chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))),
                      conv(192, 192, 3, 2, False)),
    )  # fmt: skip
    return nn.Sequential(
        *stem, a(192, 32), a(256, 64), a(288, 64), first, c(128), c(160), c(160), c(192), second,
        e(1280), e(2048), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000),
    )  # fmt: skip
