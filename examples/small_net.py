"""A network of one's own, in a module that every rank can import: `model.name = "small_net:SmallNet"`."""

from itertools import pairwise

from torch import Tensor, nn


class SmallNet(nn.Module):
    """Images (N, 3, H, W) -> logits (N, num_classes). `width` can be set as `model.settings.width`."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 4 * width, 4 * width)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
                for before, after in pairwise(channels)
            )
        )
        self.head = nn.Linear(4 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(images).mean((2, 3)))
        return logits
