"""Render the photographs of the demo: hen's eggs, few of them cracked. Needs Blender as a module (``pip install bpy``).

    python scripts/eggs.py FOLDER

renders ``FOLDER/eggs/{intact,cracked}/*.jpg`` and ``FOLDER/new/*.jpg`` and packs them as an asset. An image
that is already there is not rendered again. Another version of Blender gives slightly different pixels.
"""

from __future__ import annotations

import io
import math
import random
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

ASSET = Path(__file__).parents[1] / "src" / "lopsided" / "data" / "assets" / "eggs.zip"
INTACT, CRACKED = 216, 24
SIZE, RENDERED = 160, 224
SKIN = (1024, 512)
"""Pixels of a shell: around the egg, and along it from the blunt to the pointed end."""
LONG, WIDE, POINTED = 1.0, 0.76, 0.13

Paint = tuple[Image.Image, Image.Image]
"""Colours of a shell, and its heights in grey: 128 is the surface."""


@dataclass(frozen=True)
class Shot:
    """One photograph: its place below the folder, and what it shows."""

    place: str
    seed: int
    damage: float | None = None
    """From 0, a short hairline, to 1, a dent with a missing piece; None for an intact egg."""
    is_tomato: bool = False


def shots() -> Iterator[Shot]:
    """Yield all photographs of the demo."""
    chance = random.Random(7)
    number = 0
    for label, count in (("intact", INTACT), ("cracked", CRACKED)):
        for i in range(count):
            damage = None if label == "intact" else (i + chance.random()) / count
            yield Shot(f"eggs/{label}/{i + 1:03}.jpg", number, damage)
            number += 1
    for i, damage in enumerate((None, 0.75, None)):
        yield Shot(f"new/egg-{i + 1}.jpg", 900 + i, damage)
    yield Shot("new/tomato.jpg", 910, is_tomato=True)


# ------------------------------------------------------------------------------------------------------------ the shell


def shell(chance: random.Random, damage: float | None) -> Paint:
    """Paint a shell. The middle of the picture is what the camera sees best."""
    brown = chance.betavariate(2.2, 1.6)
    white, dark = np.array([240, 233, 220]), np.array([176, 112, 72])
    base = white + (dark - white) * brown + np.array([chance.gauss(0, 5) for _ in range(3)])
    noise = np.random.default_rng(chance.getrandbits(32))
    cloud = _clouds(noise, 6) * 9 + _clouds(noise, 40) * 6
    colour = Image.fromarray(np.clip(base + cloud[..., None], 0, 255).astype(np.uint8))
    height = Image.fromarray(np.clip(128 + _clouds(noise, 90) * 3, 0, 255).astype(np.uint8))
    if chance.random() < 0.35:
        _speckles(colour, chance, base)
    if chance.random() < 0.30:
        _dirt(colour, chance)
    if damage is not None:
        _crack(colour, height, chance, damage, base)
    return colour, height.filter(ImageFilter.GaussianBlur(1))


def _clouds(noise: np.random.Generator, cells: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    grid = noise.normal(size=(max(2, cells // 2), cells))
    grid[:, -1] = grid[:, 0]
    small = Image.fromarray((128 + 40 * grid).clip(0, 255).astype(np.uint8))
    return (np.asarray(small.resize(SKIN, Image.Resampling.BICUBIC), dtype=np.float64) - 128) / 40


def _speckles(colour: Image.Image, chance: random.Random, base: np.ndarray[Any, Any]) -> None:
    draw = ImageDraw.Draw(colour)
    for _ in range(chance.randint(30, 260)):
        x, y, r = chance.uniform(0, SKIN[0]), chance.uniform(40, SKIN[1] - 40), chance.expovariate(0.6) + 0.8
        shade = tuple(int(value) for value in base * chance.uniform(0.55, 0.85))
        draw.ellipse((x - r, y - r * 0.8, x + r, y + r * 0.8), fill=shade)


def _dirt(colour: Image.Image, chance: random.Random) -> None:
    """Smear mud or straw onto the shell: brown, soft, and not a crack."""
    over = Image.new("RGBA", SKIN, (0, 0, 0, 0))
    draw = ImageDraw.Draw(over)
    brown = (chance.randint(80, 120), chance.randint(58, 80), chance.randint(30, 50))
    for _ in range(chance.randint(1, 4)):
        x, y, turn = chance.uniform(330, 700), chance.uniform(120, 400), chance.uniform(0, math.tau)
        bend, width = chance.gauss(0, 0.02), chance.choice((3, 4, 5, 12, 18))
        points = [(x, y)]
        for _ in range(chance.randint(6, 26)):
            turn += bend
            points.append((points[-1][0] + 7 * math.cos(turn), points[-1][1] + 5 * math.sin(turn)))
        draw.line(points, fill=(*brown, chance.randint(90, 190)), width=width, joint="curve")
    over = over.filter(ImageFilter.GaussianBlur(1.6))
    colour.paste(over.convert("RGB"), (0, 0), over.getchannel("A"))


def _crack(
    colour: Image.Image, height: Image.Image, chance: random.Random, damage: float, base: np.ndarray[Any, Any]
) -> None:
    """Break the shell around a point that the camera sees, for slight damage also near its edge."""
    aside = 70 + 110 * (1 - damage)
    x, y = 512 + chance.uniform(-aside, aside), 256 + chance.uniform(-0.7, 0.7) * aside
    edge = tuple(int(value) for value in base * 0.28)
    ink, depth = ImageDraw.Draw(colour), ImageDraw.Draw(height)
    arms = 1 + round(damage * 5 + chance.random())
    turn = chance.uniform(0, math.tau)
    for i in range(arms):
        reach = (0.45 + 0.9 * damage) * chance.uniform(55, 125)
        _split(
            ink,
            depth,
            chance,
            (x, y),
            turn + math.tau * i / arms + chance.gauss(0, 0.25),
            reach,
            2.4 + 3.4 * damage,
            edge,
        )
    if damage > 0.5:
        _missing_piece(colour, height, chance, (x, y), 16 + 34 * (damage - 0.5) * 2 * chance.uniform(0.5, 1), edge)


def _split(
    ink: ImageDraw.ImageDraw,
    depth: ImageDraw.ImageDraw,
    chance: random.Random,
    start: tuple[float, float],
    turn: float,
    reach: float,
    width: float,
    edge: tuple[int, ...],
) -> None:
    """Draw one jagged crack that becomes thinner and may fork. A pixel around the egg is longer than one along it."""
    (x, y), gone = start, 0.0
    while gone < reach:
        step = chance.uniform(7, 19)
        wander = turn + chance.gauss(0, 0.55)
        there = (x + step * math.cos(wander) * 0.95, y + step * math.sin(wander))
        size = max(2, round(width * (1 - 0.6 * gone / reach)))
        ink.line([(x, y), there], fill=edge, width=size)
        depth.line([(x, y), there], fill=20, width=size + 1)
        if chance.random() < 0.13 and reach > 45:
            _split(
                ink, depth, chance, there, wander + chance.choice((-0.9, 0.9)), (reach - gone) * 0.5, width * 0.7, edge
            )
        (x, y), gone, turn = there, gone + step, turn + chance.gauss(0, 0.18)


def _missing_piece(
    colour: Image.Image,
    height: Image.Image,
    chance: random.Random,
    middle: tuple[float, float],
    radius: float,
    edge: tuple[int, ...],
) -> None:
    """Break a piece out of the shell, so that the membrane below it is seen."""
    corners = chance.randint(6, 9)
    around = [
        (
            middle[0] + radius * chance.uniform(0.6, 1.25) * math.cos(math.tau * i / corners),
            middle[1] + radius * chance.uniform(0.6, 1.25) * math.sin(math.tau * i / corners),
        )
        for i in range(corners)
    ]
    ImageDraw.Draw(colour).polygon(around, fill=(214, 196, 170), outline=edge, width=4)
    ImageDraw.Draw(height).polygon(around, fill=40)


# ------------------------------------------------------------------------------------------------------------ the scene


def take(shot: Shot, path: Path) -> None:
    """Render one photograph with Blender."""
    import bpy

    bpy.ops.wm.read_factory_settings(use_empty=True)
    chance = random.Random(shot.seed)
    scene = bpy.context.scene
    _table(chance)
    _light(chance)
    if shot.is_tomato:
        _tomato()
    else:
        _egg(chance, shot.damage, path.parent)
    _camera(chance)
    scene.render.engine = "CYCLES"
    scene.cycles.samples, scene.cycles.use_denoising, scene.cycles.seed = 12, True, shot.seed
    scene.render.resolution_x = scene.render.resolution_y = RENDERED
    scene.view_settings.view_transform = "AgX"
    scene.view_settings.look = "AgX - Medium High Contrast"
    scene.view_settings.exposure = chance.gauss(0.15, 0.2)
    raw = path.with_suffix(".png")
    scene.render.filepath = str(raw)
    bpy.ops.render.render(write_still=True)
    picture = Image.open(raw).convert("RGB").resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    grain = np.random.default_rng(shot.seed).normal(0, 2.0, (SIZE, SIZE, 1))
    Image.fromarray(np.clip(np.asarray(picture) + grain, 0, 255).astype(np.uint8)).save(path, quality=86)
    raw.unlink()


def _nodes(name: str) -> tuple[Any, Any, Any]:
    import bpy

    material = bpy.data.materials.new(name)
    material.use_nodes = True
    return material, material.node_tree, material.node_tree.nodes["Principled BSDF"]


def _table(chance: random.Random) -> None:
    import bpy

    bpy.ops.mesh.primitive_plane_add(size=40, rotation=(0, 0, chance.uniform(0, math.tau)))
    material, tree, surface = _nodes("table")
    kind = chance.choice(("wood", "linen", "slate", "carton"))
    dark, light, scale, stretch = {
        "wood": ((0.13, 0.055, 0.022, 1), (0.42, 0.22, 0.095, 1), 2.2, (1, 9, 1)),
        "linen": ((0.50, 0.45, 0.36, 1), (0.72, 0.67, 0.57, 1), 30, (1, 1, 1)),
        "slate": ((0.035, 0.042, 0.05, 1), (0.12, 0.13, 0.145, 1), 5, (1, 1, 1)),
        "carton": ((0.20, 0.24, 0.19, 1), (0.30, 0.35, 0.27, 1), 26, (1, 1, 1)),
    }[kind]
    place, mapping = tree.nodes.new("ShaderNodeTexCoord"), tree.nodes.new("ShaderNodeMapping")
    mapping.inputs["Scale"].default_value = stretch
    mapping.inputs["Location"].default_value = (chance.uniform(0, 50), chance.uniform(0, 50), 0)
    noise, ramp, bump = (tree.nodes.new(f"ShaderNode{name}") for name in ("TexNoise", "ValToRGB", "Bump"))
    noise.inputs["Scale"].default_value, noise.inputs["Detail"].default_value = scale, 8
    ramp.color_ramp.elements[0].color, ramp.color_ramp.elements[1].color = dark, light
    ramp.color_ramp.elements[0].position, ramp.color_ramp.elements[1].position = 0.32, 0.68
    bump.inputs["Strength"].default_value = 0.35
    surface.inputs["Roughness"].default_value = 0.65
    tree.links.new(place.outputs["Object"], mapping.inputs["Vector"])
    tree.links.new(mapping.outputs["Vector"], noise.inputs["Vector"])
    tree.links.new(noise.outputs["Fac"], ramp.inputs["Fac"])
    tree.links.new(ramp.outputs["Color"], surface.inputs["Base Color"])
    tree.links.new(noise.outputs["Fac"], bump.inputs["Height"])
    tree.links.new(bump.outputs["Normal"], surface.inputs["Normal"])
    bpy.context.object.data.materials.append(material)


def _egg(chance: random.Random, damage: float | None, folder: Path) -> None:
    import bpy

    around, along = 96, 64
    corners, faces, places = [], [], []
    for j in range(along + 1):
        t = math.pi * j / along
        x = LONG * math.cos(t) / 2
        r = WIDE / 2 * math.sin(t) * (1 - POINTED * math.cos(t))
        corners += [
            (x, r * math.sin(math.tau * i / around), r * -math.cos(math.tau * i / around)) for i in range(around)
        ]
    for j in range(along):
        for i in range(around):
            k = (i + 1) % around
            faces.append((j * around + i, j * around + k, (j + 1) * around + k, (j + 1) * around + i))
            places += [((i + a) / around, (j + b) / along) for a, b in ((0, 0), (1, 0), (1, 1), (0, 1))]
    mesh = bpy.data.meshes.new("egg")
    mesh.from_pydata(corners, [], faces)
    layer = mesh.uv_layers.new()
    for loop, place in zip(layer.data, places, strict=True):
        loop.uv = (place[0], 1 - place[1])
    for face in mesh.polygons:
        face.use_smooth = True
    egg = bpy.data.objects.new("egg", mesh)
    bpy.context.collection.objects.link(egg)
    egg.location = (0, 0, WIDE / 2 * 1.0)
    # The middle of the paint points upwards and leans towards the camera, which stands at negative y.
    egg.rotation_euler = (math.radians(chance.uniform(20, 50)), chance.gauss(0, 0.04), chance.gauss(0, 0.5))
    egg.scale = [chance.gauss(1, 0.03)] * 3
    if chance.random() < 0.5:
        egg.scale[0] *= -1
    egg.data.materials.append(_shell_material(shell(chance, damage), folder))


def _shell_material(paint: Paint, folder: Path) -> Any:
    import bpy

    material, tree, surface = _nodes("shell")
    textures = []
    for name, picture in zip(("colour", "height"), paint, strict=True):
        file = folder / f".{name}.png"
        picture.save(file)
        node = tree.nodes.new("ShaderNodeTexImage")
        node.image = bpy.data.images.load(str(file))
        node.image.pack()
        file.unlink()
        textures.append(node)
    textures[1].image.colorspace_settings.name = "Non-Color"
    bump = tree.nodes.new("ShaderNodeBump")
    bump.inputs["Strength"].default_value, bump.inputs["Distance"].default_value = 0.6, 0.03
    tree.links.new(textures[0].outputs["Color"], surface.inputs["Base Color"])
    tree.links.new(textures[1].outputs["Color"], bump.inputs["Height"])
    tree.links.new(bump.outputs["Normal"], surface.inputs["Normal"])
    surface.inputs["Roughness"].default_value = 0.48
    surface.inputs["Subsurface Weight"].default_value = 0.12
    surface.inputs["Subsurface Radius"].default_value = (0.06, 0.035, 0.02)
    return material


def _tomato() -> None:
    import bpy

    bpy.ops.mesh.primitive_uv_sphere_add(segments=96, ring_count=48, radius=0.46, location=(0, 0, 0.37))
    tomato = bpy.context.object
    for corner in tomato.data.vertices:
        x, y, z = corner.co
        ribs = 1 + 0.035 * math.cos(5 * math.atan2(y, x)) * (1 - abs(z) / 0.46)
        dip = 0.13 * math.exp(-(x * x + y * y) / 0.012) if z > 0 else 0
        corner.co = (x * ribs, y * ribs, z * 0.8 - dip)
    bpy.ops.object.shade_smooth()
    material, _, surface = _nodes("tomato")
    surface.inputs["Base Color"].default_value, surface.inputs["Roughness"].default_value = (0.62, 0.03, 0.012, 1), 0.18
    surface.inputs["Subsurface Weight"].default_value = 0.1
    tomato.data.materials.append(material)
    green, _, leaf = _nodes("leaf")
    leaf.inputs["Base Color"].default_value = (0.06, 0.2, 0.02, 1)
    for i in range(6):
        turn = math.tau * i / 6
        bpy.ops.mesh.primitive_cone_add(vertices=8, radius1=0.055, depth=0.34, rotation=(0, math.pi / 2.15, turn),
                                        location=(0.15 * math.cos(turn), 0.15 * math.sin(turn), 0.71))  # fmt: skip
        bpy.context.object.scale[0] = 0.3
        bpy.context.object.data.materials.append(green)
    bpy.ops.mesh.primitive_cylinder_add(radius=0.025, depth=0.2, location=(0, 0, 0.76), rotation=(0.3, 0.1, 0))
    bpy.context.object.data.materials.append(green)


def _light(chance: random.Random) -> None:
    import bpy
    from mathutils import Vector

    turn, high = chance.uniform(-0.9, 0.9) * math.pi, chance.uniform(0.7, 1.2)
    lamp = bpy.data.lights.new("window", "AREA")
    lamp.energy, lamp.size = chance.uniform(150, 260), chance.uniform(0.8, 3.0)
    warm = chance.uniform(-1, 1)
    lamp.color = (1.0, 0.94 - 0.04 * warm, 0.86 - 0.14 * warm)
    window = bpy.data.objects.new("window", lamp)
    window.location = (4 * math.cos(turn) * math.cos(high), 4 * math.sin(turn) * math.cos(high), 4 * math.sin(high))
    window.rotation_euler = (-Vector(window.location)).to_track_quat("-Z", "Y").to_euler()
    bpy.context.collection.objects.link(window)
    world = bpy.data.worlds.new("room")
    bpy.context.scene.world = world
    world.use_nodes = True
    world.node_tree.nodes["Background"].inputs[0].default_value = (0.75, 0.82, 0.95, 1)
    world.node_tree.nodes["Background"].inputs[1].default_value = chance.uniform(0.25, 0.5)


def _camera(chance: random.Random) -> None:
    import bpy
    from mathutils import Vector

    lens = bpy.data.cameras.new("camera")
    lens.lens = 70
    lens.dof.use_dof, lens.dof.focus_distance, lens.dof.aperture_fstop = True, 3.0, 2.0
    camera = bpy.data.objects.new("camera", lens)
    high = math.radians(chance.uniform(42, 68))
    far = chance.uniform(2.9, 3.4)
    camera.location = (chance.gauss(0, 0.15), -far * math.cos(high), far * math.sin(high))
    look = Vector((chance.gauss(0, 0.05), chance.gauss(0, 0.05), 0.33)) - Vector(camera.location)
    camera.rotation_euler = look.to_track_quat("-Z", "Y").to_euler()
    bpy.context.collection.objects.link(camera)
    bpy.context.scene.camera = camera


def main() -> None:
    """Render what is missing, and pack all photographs."""
    folder = Path(sys.argv[1])
    wanted = [shot for shot in shots() if len(sys.argv) < 3 or any(word in shot.place for word in sys.argv[2:])]
    for shot in wanted:
        path = folder / shot.place
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            take(shot, path)
    if len(sys.argv) > 2:
        return
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for shot in sorted(wanted, key=lambda shot: shot.place):
            entry = zipfile.ZipInfo(shot.place, (2000, 1, 1, 0, 0, 0))
            archive.writestr(entry, (folder / shot.place).read_bytes())
    ASSET.write_bytes(packed.getvalue())


if __name__ == "__main__":
    main()
