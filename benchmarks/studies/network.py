"""The network of the studies that train: much to send for little computation.

ResNet-18 at 3/8 of its width, with the stem for large images, has 1.6 million
parameters and sees images of 32 pixels at a quarter of their side.
"""

NETWORK = {
    "model.name": "resnet18",
    "model.width": 0.375,
    "model.stem": "imagenet",
    "data.batch_size": 64,
}
