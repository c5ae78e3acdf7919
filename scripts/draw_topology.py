"""Draws images/topology.png, the cluster of docs/setup_cluster.md: `uv run scripts/draw_topology.py`."""

from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).resolve().parents[1] / "images" / "topology.png"
WIDTH, HEIGHT = 12.0, 7.9
"""Of the drawing, in inches; places are inches from its lower left corner."""
BOX_WIDTH, BOX_HEIGHT = 2.5, 1.0
INK, GREY, PAPER = "#1f2933", "#52606d", "#ffffff"
WIFI, THUNDERBOLT, ETHERNET = "#2f6fb0", "#b7791f", "#2f855a"


class Machine(NamedTuple):
    """A machine's box: where its middle is, and what is written in it."""

    x: float
    y: float
    name: str
    what: str
    colour: str

    @property
    def top(self) -> float:
        return self.y + BOX_HEIGHT / 2

    @property
    def bottom(self) -> float:
        return self.y - BOX_HEIGHT / 2


MACBOOK = Machine(2.0, 6.95, "macbook", "laptop: controller", WIFI)
WIN = Machine(10.0, 6.95, "win", "laptop, WSL2: worker", WIFI)
MINI2 = Machine(2.0, 3.75, "mini2", "Mac mini: worker", THUNDERBOLT)
MINI1 = Machine(6.0, 3.75, "mini1", "Mac mini: server", THUNDERBOLT)
MINI3 = Machine(10.0, 3.75, "mini3", "Mac mini: worker, router", THUNDERBOLT)
PI5 = Machine(6.0, 0.75, "pi5", "Raspberry Pi 5: worker", ETHERNET)
PI4 = Machine(10.0, 0.75, "pi4", "Raspberry Pi 4: worker", ETHERNET)
MACHINES = (MACBOOK, WIN, MINI2, MINI1, MINI3, PI5, PI4)


class Sheet:
    """What the picture is drawn on."""

    def __init__(self) -> None:
        self.figure = Figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
        self._axes = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(0, HEIGHT))
        self._axes.set_axis_off()

    def text(
        self, x: float, y: float, words: str, colour: str = GREY, side: str = "center"
    ) -> None:
        """A line of text; `side` says which of its ends, or its middle, is at x."""
        self._axes.text(x, y, words, color=colour, size=11, ha=side, va="center", zorder=3)

    def title(self, x: float, y: float, words: str, colour: str, side: str = "center") -> None:
        self._axes.text(x, y, words, color=colour, size=12, ha=side, va="center", weight="bold")

    def network(self, bottom: float, height: float, colour: str) -> None:
        """A tinted frame of the whole width."""
        self._rounded(0.3, bottom, WIDTH - 0.6, height, fc=colour + "12", ec=colour + "66", lw=1)

    def machine(self, machine: Machine) -> None:
        """A box with a machine's name; the server's has a thick border."""
        left, border = machine.x - BOX_WIDTH / 2, 3 if machine is MINI1 else 1.5
        style = {"fc": PAPER, "ec": machine.colour, "lw": border, "zorder": 2}
        self._rounded(left, machine.bottom, BOX_WIDTH, BOX_HEIGHT, **style)
        name = {"color": INK, "size": 15, "weight": "bold", "zorder": 3}
        self._axes.text(machine.x, machine.y + 0.2, machine.name, ha="center", va="center", **name)
        self.text(machine.x, machine.y - 0.2, machine.what)

    def cable(self, xs: tuple[float, float], ys: tuple[float, float], colour: str) -> None:
        self._axes.plot(xs, ys, color=colour, lw=4, zorder=1)

    def radio(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self._axes.plot(xs, ys, color=WIFI, lw=2, ls=(0, (4, 3)), zorder=1)

    def _rounded(self, x: float, y: float, width: float, height: float, **style: object) -> None:
        corners = "round,pad=0,rounding_size=0.12"
        self._axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=corners, **style))


def draw_home(sheet: Sheet) -> None:
    """The Wi-Fi: laptops above, minis below."""
    sheet.network(5.45, 2.3, WIFI)
    sheet.title(6.0, 7.3, "home network, 192.168.1.0/24", WIFI)
    sheet.text(6.0, 6.97, "Wi-Fi: the internet, SSH,")
    sheet.text(6.0, 6.69, "and the laptop's way to the server")
    air = 5.85
    sheet.radio((MINI2.x, MINI3.x), (air, air))
    for machine, last in ((MACBOOK, 20), (WIN, 30)):
        sheet.radio((machine.x, machine.x), (machine.bottom, air))
        sheet.text(machine.x + 0.12, 6.17, f"192.168.1.{last}", WIFI, "left")
    for machine, last in ((MINI2, 12), (MINI1, 11), (MINI3, 13)):
        sheet.radio((machine.x, machine.x), (machine.top, air))
        sheet.text(machine.x + 0.12, 5.08, f"192.168.1.{last}", WIFI, "left")


def draw_bridge(sheet: Sheet) -> None:
    """The minis' Thunderbolt cables: a chain, not a ring."""
    sheet.network(2.75, 1.95, THUNDERBOLT)
    sheet.title(4.0, 4.45, "Thunderbolt bridge, 10.10.0.0/24", THUNDERBOLT)
    for left, right in ((MINI2, MINI1), (MINI1, MINI3)):
        ends = (left.x + BOX_WIDTH / 2, right.x - BOX_WIDTH / 2)
        sheet.cable(ends, (left.y, left.y), THUNDERBOLT)
        sheet.text(sum(ends) / 2, left.y + 0.2, "cable", THUNDERBOLT)
    for machine, last in ((MINI2, 2), (MINI1, 1), (MINI3, 3)):
        sheet.text(machine.x + 0.12, machine.bottom - 0.24, f"10.10.0.{last}", THUNDERBOLT, "left")


def draw_pi(
    sheet: Sheet, pi: Machine, mac: Machine, net: str, *, last_of_mac: int, last_of_pi: int
) -> None:
    """A Pi's cable to its Mac."""
    sheet.cable((mac.x, mac.x), (pi.top, mac.bottom), ETHERNET)
    sheet.title(pi.x - 0.15, 2.0, f"Ethernet, {net}.0/24", ETHERNET, "right")
    sheet.text(pi.x + 0.15, 2.4, f"{net}.{last_of_mac}", ETHERNET, "left")
    sheet.text(pi.x + 0.15, 1.5, f"{net}.{last_of_pi}", ETHERNET, "left")


def draw() -> Figure:
    sheet = Sheet()
    draw_home(sheet)
    draw_bridge(sheet)
    draw_pi(sheet, PI5, MINI1, "192.168.50", last_of_mac=1, last_of_pi=2)
    draw_pi(sheet, PI4, MINI3, "192.168.51", last_of_mac=2, last_of_pi=4)
    for machine in MACHINES:
        sheet.machine(machine)
    sheet.title(0.75, 1.25, "One subnet a physical link.", INK, "left")
    sheet.text(0.75, 0.9, "All traffic of training is between", side="left")
    sheet.text(0.75, 0.62, "a worker and the server, mini1.", side="left")
    sheet.text(0.75, 0.34, "pi4 reaches it through mini3.", side="left")
    return sheet.figure


if __name__ == "__main__":
    mpl.rcParams["font.family"] = "DejaVu Sans"  # comes with matplotlib
    PICTURE.parent.mkdir(exist_ok=True)
    draw().savefig(PICTURE, dpi=130, metadata={"Software": None}, pil_kwargs={"optimize": True})
