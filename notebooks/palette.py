"""The color and marker of each method in the figures of the notebooks.

The colors are those of Okabe and Ito, which color-blind readers can tell apart, without their
yellow, which is too faint on white. A variant of a method has its color, and a line of its own.
"""

from typing import NamedTuple


class Style(NamedTuple):
    """How a method is drawn."""

    color: str
    marker: str
    line: str = "-"


GREY, BLUE, SKY, GREEN = "#777777", "#0072B2", "#56B4E9", "#009E73"
ORANGE, PURPLE, VERMILION, BLACK = "#E69F00", "#CC79A7", "#D55E00", "#000000"

STYLES = {
    "plain": Style(GREY, "o"),
    "SVRG": Style(BLUE, "s"),
    "SVRG, stored": Style(BLUE, "d", "--"),
    "alpha-SVRG": Style(SKY, "D"),
    "SAGA": Style(GREEN, "^"),
    "SAG": Style(ORANGE, "v"),
    "SARAH": Style(PURPLE, "P"),
    "STORM": Style(VERMILION, "h"),
    "MARS": Style(BLACK, "*"),
    "MARS, approximate": Style(BLACK, "p", ":"),
}
