"""The catalogue of feature blocks: columns of features that stand beside those of an encoder's final layer.

A recipe names a block after its encoders, as in ``tf_efficientnet_lite0+pixels``. An entry says what the columns are,
how they are scaled and weighed, and where the code is; reading the catalogue needs no torch. An installed package can
add an entry through an entry point of the group ``lopsided.blocks``, whose object is a ``Block`` of the same name.

To add a block to this package, write its class below ``lopsided.models.blocks`` and its entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lopsided.errors import InputError
from lopsided.recipe.entries import Entries, load

if TYPE_CHECKING:
    from lopsided.models.blocks.block import FeatureBlock


GROUP = "lopsided.blocks"
"""The group of entry points through which other packages add blocks."""


@dataclass(frozen=True)
class Block:
    """An entry of the catalogue.

    ``code`` is the class of the block, or "module:Class". ``reads`` says what it is computed from: the image, or layers
    of an encoder, in the same pass as its final layer. ``title`` completes "an encoder, joined with ...".

    ``scaling`` says how ``encoder.scaling`` changes its columns: "joint" like those of the final layers and together
    with them, "apart" each group of columns by itself, "none" not at all. ``share`` is the weight that a regression
    gives to each group of its columns, as a share of the weight of the final layers. A recipe can set another one, as
    in ``pixels:0.5``. None: each column has the weight 1.

    ``program`` is how a reader of the model card computes the columns, from ``image`` or from ``pixels`` by
    ``encoder``, and appends them to ``features``. Its fields are ``height``, ``width``, ``by`` (the resampling),
    ``views`` and ``scaled``, the scaling of ``columns``. Without it, the card shows no program for the classifier.

    ``version`` is another one whenever the columns of an image change: cached ones of other versions are not used.
    ``is_local`` marks many columns of which each is about one position in the image. Only a distance of positions reads
    them: they are no inputs of a regression, and no image is compared with another by them.
    """

    name: str
    code: str | type[FeatureBlock]
    reads: Literal["image", "encoder"]
    title: str
    scaling: Literal["joint", "apart", "none"] = "none"
    share: float | None = 1.0
    program: str = ""
    version: int = 1
    is_local: bool = False

    def load(self) -> type[FeatureBlock]:
        """Import the class of the block."""
        if not isinstance(self.code, str):
            return self.code
        try:
            found: type[FeatureBlock] = load(self.code)
        except (ImportError, AttributeError) as error:
            raise InputError(f"The code of the feature block {self.name} cannot be imported ({error}).") from error
        return found


FINAL = Block("final", "", "encoder", "the final layer", scaling="joint", share=None)
"""The final layer of an encoder, which stands for the encoder itself. No recipe names it."""

_PIXELS_PROGRAM = """

def averages(size, parts):  # over equal intervals of a row of pixels
    edges, pixel = torch.linspace(0, size, parts + 1), torch.arange(size)
    overlap = torch.minimum(edges[1:, None], pixel + 1) - torch.maximum(edges[:-1, None], pixel)
    return overlap.clamp(min=0) * parts / size


# Mean and deviation of colours in 8 x 8 cells, averaged over mirror images and views.
pixels = torch.from_numpy(np.array(image.resize(({width}, {height}), {by}))).permute(2, 0, 1) / 255
colours = torch.stack([{views}])
small = averages({height}, 64) @ colours @ averages({width}, 64).T
mean = averages(64, 8) @ small @ averages(64, 8).T
rest = small - mean.repeat_interleave(8, -2).repeat_interleave(8, -1)
deviation = (averages(64, 8) @ rest.square() @ averages(64, 8).T).sqrt()
cells = torch.cat([mean, deviation], dim=1).mean(dim=0)
cells = (cells + cells.flip(1))[:, :4]
cells = (cells + cells.flip(2))[:, :, :4] / 4
features = torch.cat([features, cells.flatten()])
"""

PIXELS = Block(
    "pixels",
    "lopsided.models.blocks.pixels:Pixels",
    "image",
    "the colours of regions",
    share=0.3,
    program=_PIXELS_PROGRAM,
)
_STAGES_PROGRAM = """

# Two numbers per channel after each stage of the encoder, averaged over views: mean and deviation over positions, or
# the class token and the mean of the others.
names = [stage["module"] for stage in encoder.feature_info]
if "conv_stem.weight" in encoder.state_dict():
    names = ["bn1"] + [f"blocks.{{i}}" for i in range(len(encoder.blocks))]
elif len(names) > 8:
    names = [names[len(names) * i // 4 - 1] for i in (1, 2, 3, 4)]
maps, prefix = [], getattr(encoder, "num_prefix_tokens", 0)
for name in names:
    encoder.get_submodule(name).register_forward_hook(lambda _, __, output: maps.append(output))
with torch.no_grad():
    encoder(torch.stack([{views}]))
for x in maps:
    x = x.permute(0, 3, 1, 2) if x.ndim == 4 and getattr(encoder, "output_fmt", "") == "NHWC" else x
    axes = (2, 3) if x.ndim == 4 else 1
    pair = [x.mean(axes), x.std(axes, correction=0)]
    if x.ndim == 3 and prefix:
        pair = [x[:, 0], x[:, prefix:].mean(1)]
    columns = torch.cat(pair, dim=1).mean(dim=0)
    {scaled}
    features = torch.cat([features, columns])
"""

STAGES = Block(
    "stages",
    "lopsided.models.blocks.stages:Stages",
    "encoder",
    "the stages before its final layer",
    scaling="apart",
    share=0.3,
    program=_STAGES_PROGRAM,
    version=2,
)
_REGIONS_PROGRAM = """

# The mean of each channel in 4 x 4 regions, averaged over mirror images and views, after the first stages of the
# encoder, up to 128 channels.
names = [stage["module"] for stage in encoder.feature_info]
if "conv_stem.weight" in encoder.state_dict():
    names = ["bn1"] + [f"blocks.{{i}}" for i in range(len(encoder.blocks))]
elif len(names) > 8:
    names = [names[len(names) * i // 4 - 1] for i in (1, 2, 3, 4)]
outputs, channels, prefix = [], 0, getattr(encoder, "num_prefix_tokens", 0)
for name in names:
    encoder.get_submodule(name).register_forward_hook(lambda _, __, output: outputs.append(output))
with torch.no_grad():
    encoder(torch.stack([{views}]))
for x in outputs:
    x = x.permute(0, 3, 1, 2) if x.ndim == 4 and getattr(encoder, "output_fmt", "") == "NHWC" else x
    if x.ndim == 3:
        x = x[:, prefix:].transpose(1, 2)
        side = int(x.shape[2] ** 0.5)
        x = x.unflatten(2, (side, side) if side * side == x.shape[2] else (1, -1))
    channels += x.shape[1]
    if channels in (x.shape[1], *range(129)):
        cells = torch.nn.functional.adaptive_avg_pool2d(x, 4)
        columns = ((cells + cells.flip(3)) / 2)[..., :2].flatten(1).mean(dim=0)
        {scaled}
        features = torch.cat([features, columns])
"""

REGIONS = Block(
    "regions",
    "lopsided.models.blocks.regions:Regions",
    "encoder",
    "its first stages by regions of the image",
    scaling="apart",
    share=0.3,
    program=_REGIONS_PROGRAM,
)
POSITIONS = Block(
    "positions",
    "lopsided.models.blocks.positions:Positions",
    "encoder",
    "its middle stages by position",
    is_local=True,
)
BLOCKS: Entries[Block] = Entries(
    GROUP,
    "feature block",
    Block,
    {
        "pixels": "lopsided.recipe.blocks:PIXELS",
        "stages": "lopsided.recipe.blocks:STAGES",
        "regions": "lopsided.recipe.blocks:REGIONS",
        "positions": "lopsided.recipe.blocks:POSITIONS",
    },
)


def find(name: str, *, built_in: bool = False) -> Block | None:
    """Return the entry of a block, or None if there is none. ``built_in``: search no installed packages."""
    return BLOCKS.find(name) if name in (BLOCKS.built_in if built_in else BLOCKS.names()) else None


CATEGORY = ":category"
"""The end of the name of a column whose numbers are codes of categories."""
Cells = tuple[str, ...]
"""The texts of these columns in one row."""


def column_name(asked: str) -> str:
    """Return the name of a column in a table.

    >>> column_name("age"), column_name("site:category")
    ('age', 'site')
    """
    return asked.removesuffix(CATEGORY)
