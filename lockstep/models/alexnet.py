"""AlexNet in one ungrouped column with batch norm (Jia et al. 2018, section 3.2): images → logits, step 6 of the walk.

62,378,344 parameters without batch norm for 1000 classes. Batch norm follows every convolution, not only the two that
LRN followed: that is the usual AlexNet-BN, and with it the paper's cut after tensor 20 falls right behind conv5
(5 × weight, bias, γ, β). The paper's own change is one more batch norm after pool5, whose variance grows in training.
"""

from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.models.norm import BatchNorm, BatchNormRelu

FULLY_CONNECTED = 4096


class AlexNet(nn.Module):
    """Five convolutions (`features`) and three fully connected layers (`classifier`)."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def _convolution(
    in_channels: int, out_channels: int, kernel: int, batch_norm: bool, *, stride: int = 1, padding: int
) -> list[nn.Module]:
    """Convolution, batch norm (which makes the bias needless) where asked, ReLU."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, padding, bias=not batch_norm)
    return [convolution, BatchNormRelu(out_channels) if batch_norm else nn.ReLU(inplace=True)]


def pool5_side(image_size: int) -> int:
    """The side of pool5's output: 6 for images of 224 (or 227) pixels."""
    side = (image_size + 2 * 2 - 11) // 4 + 1
    for _ in range(3):
        side = (side - 3) // 2 + 1
    return side


def build_alexnet(
    num_classes: int,
    batch_norm: bool = True,
    pool5_batch_norm: bool = True,
    dropout: float = 0.5,
    image_size: int = 224,
) -> AlexNet:
    """Build the network for square images; without `batch_norm` it has none at all, after pool5 neither."""
    side = pool5_side(image_size)
    if side < 1:
        raise LockstepError(f"AlexNet needs images of at least 63 pixels, not {image_size}: enlarge data.image_size.")
    features = nn.Sequential(
        *_convolution(3, 96, 11, batch_norm, stride=4, padding=2),
        nn.MaxPool2d(3, stride=2),
        *_convolution(96, 256, 5, batch_norm, padding=2),
        nn.MaxPool2d(3, stride=2),
        *_convolution(256, 384, 3, batch_norm, padding=1),
        *_convolution(384, 384, 3, batch_norm, padding=1),
        *_convolution(384, 256, 3, batch_norm, padding=1),
        nn.MaxPool2d(3, stride=2),
        *([BatchNorm(256)] if batch_norm and pool5_batch_norm else []),
    )
    classifier = nn.Sequential(
        nn.Linear(256 * side * side, FULLY_CONNECTED),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(FULLY_CONNECTED, FULLY_CONNECTED),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(FULLY_CONNECTED, num_classes),
    )
    return AlexNet(features, classifier)
