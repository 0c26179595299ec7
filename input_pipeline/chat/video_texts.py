"""What stands between the frames of videos in texts, as the processors of transformers write it."""

import datetime

from input_pipeline.images.images import EncodedImage
from input_pipeline.images.videos import CLOCKED, INTRODUCED, TIMED

_SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
          "seventeen eighteen nineteen").split()
_TENS = ("", "", *"twenty thirty forty fifty sixty seventy eighty ninety".split())


def texts(kind: str, video: EncodedImage, begin: str, end: str) -> list[str]:
  """What stands before the tokens of the first frame (of a place in time), between those of each two, and behind the
  last.

  Args:
    kind: TIMED, CLOCKED (Gemma 4) or INTRODUCED (SmolVLM).
    video: has its frames' seconds, and how long it is.
    begin, end: what stands around each frame, as around an image.
  """
  assert video.seconds is not None
  clock = [f"{int(s // 60):02d}:{int(s % 60):02d}" for s in video.seconds]
  said, first, last = {
      TIMED: ([f"<{s:.1f} seconds>" for s in video.seconds], "", ""),
      CLOCKED: ([" " * (i > 0) + f"{time} " for i, time in enumerate(clock)], "", ""),
      INTRODUCED: ([f"\nFrame from {time}:" for time in clock],
                   f"You are provided the following series of {words(len(clock))} frames from a "
                   f"{datetime.timedelta(seconds=video.length)} [H:MM:SS] video.\n", "\n\n"),
  }[kind]
  return [first + said[0] + begin, *(end + one + begin for one in said[1:]), end + last]


def words(number: int) -> str:
  """A number below a million in English words, as num2words has it."""
  if number < 20:
    return _SMALL[number]
  if number < 100:
    return _TENS[number // 10] + (f"-{_SMALL[number % 10]}" if number % 10 else "")
  large, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
  whole, rest = divmod(number, large)
  return f"{words(whole)} {name}" + (f"{' and ' if rest < 100 else ', '}{words(rest)}" if rest else "")
