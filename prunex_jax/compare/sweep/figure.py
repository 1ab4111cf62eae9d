"""The figure that rows are compared by: a metric of the task, and how it is shown."""

import dataclasses

_ACCURACY = "accuracy"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A metric of the task.

    Example:
      >>> Figure().title('test'), Figure('bits_per_byte', True).title('validation')
      ('test accuracy, %', 'validation bits per byte')
    """

    metric: str = _ACCURACY  # As the task names it.
    less_is_better: bool = False  # Whether it is a loss, or the like.

    @property
    def words(self) -> str:
        """What it is called in a sentence."""
        return self.metric.replace("_", " ")

    @property
    def heading(self) -> str:
        """What it is called where a line begins."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def factor(self) -> int:
        """By what values are multiplied to be shown."""
        return 100 if self.metric == _ACCURACY else 1

    @property
    def digits(self) -> int:
        """Decimals that are shown."""
        return 2 if self.metric == _ACCURACY else 4

    @property
    def differences(self) -> str:
        """What differences are in."""
        return f"points of {self.words}" if self.factor == 100 else self.words

    def title(self, split: str) -> str:
        """What tables and axes call it, measured on a split."""
        return f"{split} {self.words}{', %' if self.factor == 100 else ''}"

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is as good as the target, or better.

        Example:
          >>> Figure().reaches(0.5, 0.4), Figure('loss', True).reaches(0.5, 0.4)
          (True, False)
        """
        return value <= target if self.less_is_better else value >= target
