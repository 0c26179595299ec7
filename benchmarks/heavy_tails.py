"""Sampling completions whose lengths have a heavy tail: a cache in pages beside rows as long as the longest, in turns.

    python -m benchmarks.heavy_tails
    WEFT_SPEED_SIZE=tiny python -m benchmarks.heavy_tails --median 32 --most 512
    WEFT_SPEED_SIZE=tiny python -m benchmarks.heavy_tails --carry 2 --group 4
    WEFT_SPEED_SIZE=tiny python -m benchmarks.heavy_tails --turns 4 --median 32 --most 512 --seconds 0.1
    WEFT_SPEED_SIZE=tiny python -m benchmarks.heavy_tails --turns 6 --median 16 --seconds 0 --kept 64 --prompt 512

With `--carry K`: rollouts of so many texts, in groups, each of which waits for its longest text, beside rollouts whose
texts go on in the next one for up to K updates (`rollout.carry_over`), in turns; the first K + 1 of both, in which rows
fill, are not counted, and all were gone through once before. Tokens are those that a rollout gives to training.

With `--turns N`: conversations of so many completions, each answered by 8 tokens after `--seconds`, turn by turn beside
turns that are interleaved (`rollout.turn_share`). With `--kept K` as well, beside both with up to K texts kept between
turns (`rollout.kept_texts`); `--prompt T` makes prompts of T tokens.

Lengths are lognormal (sigma 1) and set as limits: fresh parameters end nowhere near so. A first round, in which both
ways are compiled, is not counted; tokens and log-probs are compared. Seconds are wall time, and those of processors,
which other programs on the machine disturb less. The model is one of benchmarks/speed/sizes.py.
"""

import argparse
import dataclasses
import time
from types import SimpleNamespace
from typing import Any

from trainer import startup


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  for name, default in dict(
      texts=64, rows=16, median=128, most=2048, rounds=2, carry=0, group=4, turns=0, seconds=0.1, share=0.125,
      kept=0, prompt=0).items():
    parser.add_argument(f"--{name}", type=type(default), default=default)
  args = parser.parse_args()

  import jax
  import numpy as np

  from benchmarks.speed import weft_config
  from benchmarks.speed.sizes import CHOSEN as size
  from trainer import program
  from trainer.generate.sampler import Sampler

  config, _ = program.resolve(weft_config.get_config("grpo,unused"))
  startup.set_environment(config.precision)
  startup.keep_compiled_programs()
  program.settle(config, jax.default_backend())
  model = program.make_model(config, size.vocab)
  params = jax.jit(model.init)(jax.random.key(0))
  rng = np.random.default_rng(1)
  prompts = rng.integers(4, size.vocab, (args.texts, args.prompt or size.prompt_len))
  limits = np.clip(args.median * np.exp(rng.normal(size=args.texts)), 1, args.most).astype(int)
  if args.carry:
    carry(args, Sampler(model, rows=args.rows), params, size)
    return
  if args.turns:
    turns(args, Sampler(model, rows=args.rows), params, prompts)
    return
  parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f"{parameters:,} parameters; {args.texts} texts, {args.rows} at a time, of {limits.mean():.0f} tokens on "
        f"average and {limits.max()} at most")
  samplers = {"rows": Sampler(model, rows=args.rows), "pages": Sampler(model, rows=args.rows)}
  for name, sampler in samplers.items():
    sampler.paged = name == "pages"
  found, seconds = {}, {name: [] for name in samplers}
  for n in range(args.rounds + 1):
    for name, sampler in samplers.items():
      wall, busy = time.perf_counter(), time.process_time()
      found[name] = sampler.generate(params, prompts, max_new_tokens=limits.tolist(), seed=n)
      wall, busy = time.perf_counter() - wall, time.process_time() - busy
      seconds[name].append((wall, busy))
      if n:
        print(f"{name:<6}{wall:8.2f} s {limits.sum() / wall:8.1f} tokens/s {busy:8.2f} s of processors", flush=True)
    pairs = list(zip(found["rows"], found["pages"], strict=True))
    same = [(a, b) for a, b in pairs if (a.ids == b.ids).all()]
    apart = max(float(abs(a.logprobs - b.logprobs).max()) for a, b in same)
  for which, what in enumerate(("wall time", "time of processors")):
    rows, pages = (min(pair[which] for pair in seconds[name][1:]) for name in ("rows", "pages"))
    print(f"pages take {rows / pages:.2f} times less {what}, best of {args.rounds}")
  print(f"of the last round {len(same)} of {args.texts} texts are the same, log-probs of these to {apart:.1e}")


def carry(args: argparse.Namespace, sampler: Any, params: Any, size: Any) -> None:
  """Rollouts one after another, whole and carried over, in turns."""
  import numpy as np

  from trainer.generate.completion import Request
  from trainer.rollouts.carried import Ages, fresh, go_on

  def prompt(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(4, size.vocab, size.prompt_len)

  def length(number: int, sample: int) -> int:
    return int(np.clip(args.median * np.exp(np.random.default_rng((number, sample)).normal()), 1, args.most))

  def stream(prompts: list, places: list[int], samples: list, begun: list, seed: list, until: Any, **_: Any) -> Any:
    # A prompt for each completion, since each has a limit of its own.
    of = [(n, sample) for n in range(len(prompts)) for sample in samples[n]]
    numbers = [groups[places[n]].number for n, _ in of]
    for part in sampler.stream(params, [prompts[n] for n, _ in of], Request(
        max_new_tokens=[length(number, sample) for number, (_, sample) in zip(numbers, of, strict=True)],
        samples=[[sample] for _, sample in of], begun=[begun[n] for n, _ in of], seed=[seed[n] for n, _ in of],
        in_order=True, until=until)):
      yield dataclasses.replace(part, prompt=of[part.prompt][0])

  steps, real = 0, sampler._program

  def counted_program(name: str, *args: Any, **named: Any) -> Any:
    def decode(read: Any, state: Any, *rest: Any) -> Any:
      nonlocal steps
      before = np.array(state.counts_B)  # a copy: the state is given away
      state, chunk = real(name, *args, **named)(read, state, *rest)
      steps += int((np.asarray(chunk.counts_B) - before).max())
      return state, chunk

    return decode if name == "decode" else real(name, *args, **named)

  sampler._program = counted_program
  of_rollout, first = args.texts // args.group, args.carry + 1
  found: dict[str, list[tuple[int, float, float, int]]] = {}
  for counted in (False, True):  # programs are compiled in the same rollouts before
    going, drawn, found = {"whole": [], "carried": []}, {"whole": 0, "carried": 0}, {"whole": [], "carried": []}
    for step in range(first + args.rounds):
      for name in found:
        ages = Ages(step, step, 1, of_rollout, args.carry if name == "carried" else 0)
        new = ages.most(of_rollout, sampler.rows) - len(going[name])
        groups = going[name] + [fresh(n, "heavy", args.group) for n in range(drawn[name], drawn[name] + new)]
        prompts, steps = [prompt(group.number) for group in groups], 0
        wall, busy = time.perf_counter(), time.process_time()
        whole, rest = go_on(groups, of_rollout, ages, prompts, [0] * len(groups), stream, lambda: False)
        wall, busy = time.perf_counter() - wall, time.process_time() - busy
        going[name] = [group for group in rest if group.oldest is not None]
        drawn[name] += new - (len(rest) - len(going[name]))
        tokens = sum(len(text.ids) for group in whole for text in group.texts)
        found[name].append((tokens, wall, busy, steps))
        if counted and step >= first:
          print(f"{name:<8}{tokens:7} tokens {wall:8.2f} s {tokens / wall:8.1f} tokens/s {busy:8.2f} s of processors "
                f"{steps:6} steps; {len(going[name])} groups go on", flush=True)
  totals = {name: np.sum(rows[first:], axis=0) for name, rows in found.items()}
  for which, what in enumerate(("wall time", "time of processors", "decoding steps"), 1):
    before, after = (total[0] / total[which] for total in totals.values())
    print(f"carried over {after / before:.2f} times the tokens in the same {what}, over {args.rounds} rollouts")


def turns(args: argparse.Namespace, sampler: Any, params: Any, prompts: Any) -> None:
  """Conversations, turn by turn and interleaved."""
  import numpy as np

  from trainer.generate.completion import More, Request, joined
  from trainer.generate.kept import Kept
  from trainer.rollouts.environment_calls import Calls
  from trainer.rollouts.turns import Answers, Asked, Interleaved

  def room(episode: Any) -> int:
    length = np.random.default_rng((episode.sample, episode.turns)).normal()
    return int(np.clip(args.median * np.exp(length), 1, args.most))

  def said(episode: Any, completion: Any) -> None:
    episode.ids = np.concatenate([episode.ids, completion.ids])
    episode.turns += 1

  def step(_: Any) -> dict[str, Any]:
    time.sleep(args.seconds)
    return {"added": np.arange(4, 12, dtype=np.int32)}

  def answered(episodes: Any, answers: list[dict[str, Any]]) -> None:
    for episode, answer in zip(episodes, answers, strict=True):
      episode.ids, episode.over = np.concatenate([episode.ids, answer["added"]]), episode.turns == args.turns

  def play(interleaved: bool, kept: Kept | None, seed: int) -> int:
    item = SimpleNamespace(prompt=SimpleNamespace(images=()))
    everyone: Any = [SimpleNamespace(ids=ids, sample=n, turns=0, over=False, calls=Calls(None), item=item)
                     for n, ids in enumerate(prompts.astype(np.int32))]
    going: dict[int, list[Any]] = {}
    ended: list[Any] = []
    tokens, playing, answers = 0, everyone, Answers(len(everyone))
    asked = Asked(room, False, args.turns)
    way = Interleaved(asked, answers, step, said, answered, everyone, args.share)

    def more(idle: bool) -> More:
      new, ended[:] = list(ended), []
      return More(*way.more(new, idle))

    while playing:
      first, options = asked.ask(playing)
      request = Request(**options, seed=seed, more=more if interleaved else None, kept=kept)
      for part in sampler.stream(params, first, request):
        going.setdefault(part.prompt, []).append(part)
        tokens += len(part.ids)
        ended += [joined(going.pop(part.prompt))] if part.finish_reason else []
      if not interleaved:
        for episode, completion in asked.of(ended):
          said(episode, completion)
        answers.start(step, playing)
        answered(playing, answers.of(playing))
        asked, ended = Asked(room, False, args.turns), []
      playing = [episode for episode in everyone if not episode.over]
    for episode in everyone:
      episode.calls.close()
    return tokens

  spent: dict[tuple[str, int], list[tuple[float, float]]] = {
      (way, most): [] for way in ("turn by turn", "interleaved") for most in sorted({0, args.kept})}
  for n in range(args.rounds + 1):
    for (way, most), found in spent.items():
      kept = Kept(most, once=True, cut=True) if most else None
      wall, busy = time.perf_counter(), time.process_time()
      tokens = play(way == "interleaved", kept, n)
      wall, busy = time.perf_counter() - wall, time.process_time() - busy
      reused = "" if kept is None else f"; of prompts {kept.run} tokens run, {kept.reused} reused"
      if n:
        found.append((wall, busy))
        print(f"{way:<13}{f'{most} kept' if most else '':<9}{tokens:7} tokens {wall:8.2f} s {tokens / wall:8.1f} "
              f"tokens/s {busy:8.2f} s of processors{reused}", flush=True)
  walls, busies = ({key: min(times[which] for times in found) for key, found in spent.items()} for which in (0, 1))
  for most in sorted({0, args.kept}):
    print(f"interleaved turns take {walls['turn by turn', most] / walls['interleaved', most]:.2f} times less wall time"
          f"{f' with {most} kept' if most else ''}, best of {args.rounds}")
  for way in ("turn by turn", "interleaved") if args.kept else ():
    print(f"{way} with {args.kept} kept takes {walls[way, 0] / walls[way, args.kept]:.2f} times less wall time, "
          f"{busies[way, 0] / busies[way, args.kept]:.2f} times less time of processors, best of {args.rounds}")



if __name__ == "__main__":
  startup.use_huge_pages()
  main()
