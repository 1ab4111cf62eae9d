"""Small programs around single primitives, drawn by seed, to attack every rule.

drawing      operands: what is dead along which axis, and what is not finite
operations   for every rule, how its primitive is drawn
checking     what reads the results, and masked against shrunk
"""

from tests.helpers.generated.checking import Verdict, check
from tests.helpers.generated.operations import BUILDERS

__all__ = ["BUILDERS", "Verdict", "check"]
