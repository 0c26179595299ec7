"""Where images stand: in rows of every shape, in what templates of every kind render, in tokens; nothing is lost."""

import json

import numpy as np
import pytest

from input_pipeline.chat.image_placeholders import IMAGE, ImageFormat, preprocess_of
from input_pipeline.chat.image_template import ImageTemplate
from input_pipeline.chat.template import ChatTemplate
from input_pipeline.examples.prompts import Prompter
from input_pipeline.examples.registry import make_encoder
from input_pipeline.images.images import ImageError
from input_pipeline.sources.made import png
from input_pipeline.sources.readers import Record
from input_pipeline.tokenizer.tokenizer import BOS, EOS, BytesTokenizer, load_tokenizer
from trainer.config import defaults
from trainer.config.checks import resolve
from trainer.errors import ConfigError, DataError
from trainer.strategies import learns

SPECIALS = ("<image>", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "<start_of_turn>", "<end_of_turn>")
TOKEN = 258 + SPECIALS.index("<image>")
RED, BLUE = (png(np.full((2, 2, 3), c, np.uint8)) for c in ((200, 0, 0), (0, 0, 200)))
LLAVA = """{% for message in messages %}{{ message.role | upper + ': ' }}\
{% for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}\
{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}\
{{ eos_token if message.role == 'assistant' else ' ' }}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT: {% endif %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}\
<start_of_turn>{{ 'model' if message.role == 'assistant' else 'user' }}
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content %}\
{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  """Bytes, with the special tokens of the families."""
  folder = tmp_path_factory.mktemp("tokenizer")
  BytesTokenizer().save(folder / "tokenizer.json")
  spec = json.loads((folder / "tokenizer.json").read_text())
  last = spec["added_tokens"][-1]
  spec["added_tokens"] += [{**last, "id": 258 + i, "content": token} for i, token in enumerate(SPECIALS)]
  (folder / "tokenizer.json").write_text(json.dumps(spec))
  return load_tokenizer(folder)


def configured(template=None, strategy="sft", chat=(), images=(), **vision):
  vision = dict(tower="siglip", image_size=4, patch_size=2, image_token=TOKEN) | vision
  options = dict(baseline="group", scale="group") if strategy == "grpo" else {}
  return resolve({"strategy": {"name": strategy, **options}, "model": {"vision": vision},
                  "input": {"images": dict(images)},
                  "chat": dict(chat) | ({} if template is None else {"template": template})})


def write(tmp_path, text):
  (tmp_path / "t.jinja").write_text(text)
  return str(tmp_path / "t.jinja")


def encode(row, tokenizer, config, folder=None):
  return make_encoder(config, tokenizer, learns=learns(config)).encode([Record("a", "a.jsonl:1", row, folder)])


def show(document, tokenizer, each=4):
  """The text with an image as █ and what is trained in brackets; and the contents of the images."""
  text, inside, t = "", False, 0
  weights = document.weights if document.weights is not None else np.ones(len(document.ids))
  while t < len(document.ids):
    if (weights[t] > 0) != inside:
      text, inside = text + ("]" if inside else "["), not inside
    if t in document.places:
      assert (document.ids[t:t + each] == TOKEN).all() and not weights[t:t + each].any()
      text, t = text + "█", t + each
    else:
      text, t = text + tokenizer.decode([document.ids[t]], skip_special=False), t + 1
  return text + ("]" if inside else ""), [image.data for image in document.images]


def test_paligemma_has_images_before_bos(tokenizer):
  config = configured(attention="prefix")
  (document,) = encode({"image": RED, "prefix": "caption en", "suffix": "a red square"}, tokenizer, config)
  assert show(document, tokenizer) == (f"█{BOS}caption en\n[a red square{EOS}]", [RED])
  (two,) = encode({"images": [RED, BLUE], "prefix": "<image> <image>which?", "suffix": "red"}, tokenizer, config)
  assert show(two, tokenizer) == (f"██{BOS}which?\n[red{EOS}]", [RED, BLUE])
  (none,) = encode({"prefix": "a <image>", "suffix": "b"}, tokenizer, config)
  assert show(none, tokenizer) == (f"{BOS}a <image>\n[b{EOS}]", [])
  with pytest.raises(DataError, match="a.jsonl:1: '<image>' stands within the text"):
    encode({"image": RED, "prefix": "a <image>", "suffix": "b"}, tokenizer, config)


def test_strings_have_images_where_the_text_says_or_before_it(tokenizer):
  config = configured()
  row = {"images": [RED, BLUE], "prompt": "from <image> to <image>:", "completion": " <image> x"}
  (document,) = encode(row, tokenizer, config)
  assert show(document, tokenizer) == (f"{BOS}from █ to █:[ <image> x{EOS}]", [RED, BLUE])
  (document,) = encode(row | {"prompt": "what?"}, tokenizer, config)
  assert show(document, tokenizer)[0] == f"{BOS}██what?[ <image> x{EOS}]"
  with pytest.raises(DataError, match=r"a.jsonl:1: 2 image\(s\), but 1 × '<image>' in the text"):
    encode(row | {"prompt": "what <image>?"}, tokenizer, config)
  (text,) = encode({"text": "see <image>!", "image": RED}, tokenizer, config)
  assert show(text, tokenizer)[0] == f"[{BOS}see ]█[!{EOS}]"


PARTS = [{"type": "text", "text": "which of "}, {"type": "image", "image": RED}, {"type": "text", "text": " and "},
         {"type": "image_url", "image_url": {"url": "blue.png"}}]
SAID = {"role": "assistant", "content": "red"}


@pytest.mark.parametrize("row", [
    {"messages": [{"role": "user", "content": PARTS}, SAID]},
    {"messages": [{"role": "user", "content": "which of <image> and <image>"}, SAID], "images": [RED, "blue.png"]},
    {"messages": [{"role": "user", "content": [{"type": "image"} if "image" in p["type"] else p for p in PARTS]}, SAID],
     "images": [{"bytes": RED, "path": None}, "blue.png"]},
    {"conversations": [{"from": "human", "value": "which of <image> and <image>"}, {"from": "gpt", "value": "red"}],
     "image": [RED, "blue.png"]},
    {"prompt": [{"role": "user", "content": PARTS}], "completion": [SAID]},
    {"instruction": "which of <image> and <image>", "output": "red", "images": [RED, "blue.png"]},
])
def test_conversations_of_every_shape_and_templates_of_every_kind(row, tokenizer, tmp_path):
  (tmp_path / "blue.png").write_bytes(BLUE)
  user, model = f"{BOS}<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n[red<end_of_turn>]\n"
  for template, text in (
      (write(tmp_path, GEMMA), f"{user}which of█and█{model}"), ("gemma", f"{user}which of █ and █{model}"),
      ("plain", f"{BOS}User: which of █ and █\nAssistant:[ red{EOS}]\n")):
    (document,) = encode(row, tokenizer, configured(template), tmp_path)
    assert show(document, tokenizer) == (text, [RED, BLUE])
  (document,) = encode(row, tokenizer, configured(write(tmp_path, LLAVA)), tmp_path)
  assert show(document, tokenizer) == (f"USER: █\n█\nwhich of  and  ASSISTANT: [red{EOS}]", [RED, BLUE])


def test_gemma_3_frames_its_images(tokenizer, tmp_path):
  row = {"messages": [{"role": "user", "content": "see <image>!"}, SAID], "image": RED}
  for template, space in ((write(tmp_path, GEMMA), ""), ("gemma", " ")):
    (document,) = encode(row, tokenizer, configured(template, projector="pool", tokens_per_image=1))
    assert show(document, tokenizer, 1)[0] == (
        f"{BOS}<start_of_turn>user\nsee{space}\n\n<start_of_image>█<end_of_image>\n\n!<end_of_turn>\n"
        "<start_of_turn>model\n[red<end_of_turn>]\n")
  framed = configured("plain", chat=dict(image_before="(", image_after=")"))
  assert show(encode(row, tokenizer, framed)[0], tokenizer)[0] == f"{BOS}User: see (█)!\nAssistant:[ red{EOS}]\n"
  bare = configured("plain", projector="pool", tokens_per_image=1, chat=dict(image_before="", image_after=""))
  assert show(encode(row, tokenizer, bare)[0], tokenizer, 1)[0] == f"{BOS}User: see █!\nAssistant:[ red{EOS}]\n"


def test_images_without_a_place_stand_before_what_the_user_says_first(tokenizer):
  row = {"images": [RED, BLUE], "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "which?"},
                                             SAID]}
  (document,) = encode(row, tokenizer, configured("gemma"))
  assert show(document, tokenizer)[0].startswith(f"{BOS}<start_of_turn>user\ns\n\n██which?<end_of_turn>")


def test_what_a_user_typed_is_no_image(tokenizer, tmp_path):
  content = [{"type": "image", "image": RED}, {"type": "text", "text": "is <image> or <start_of_image> this"}]
  row = {"messages": [{"role": "user", "content": content}, SAID]}
  for template in (GEMMA, LLAVA):
    (document,) = encode(row, tokenizer, configured(write(tmp_path, template)))
    assert len(document.places) == 1 and (document.ids == TOKEN).sum() == 4
    assert "is <image> or <start_of_image> this" in show(document, tokenizer)[0]
    assert 258 + SPECIALS.index("<start_of_image>") not in document.ids
  with pytest.raises(DataError, match=r"a.jsonl:1: a text has U\+1FFFE"):
    encode({"messages": [{"role": "user", "content": f"a {IMAGE}"}, SAID]}, tokenizer, configured("gemma"))


@pytest.mark.parametrize("row, says", [
    ({"messages": [{"role": "user", "content": "<image>"}, SAID], "images": [RED, BLUE]},
     r"columns have 2 image\(s\), for 1 × '<image>'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, r"columns have 0 image\(s\), for 1 parts"),
    ({"messages": [{"role": "user", "content": "a"}, SAID], "images": [RED], "image": RED}, "'image' and 'images'"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, SAID]}, "expected {'type': 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, SAID]}, "expected {'type': 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "video"}]}, SAID]},
     r"content\[0\] is a video, which the model does not see \(model.vision.tower is 'siglip'\).*Give some of its"),
    ({"prompt": "a", "completion": "b", "videos": ["a.mp4"]},
     r"videos\[0\] is a video.*Videos are for the models of Qwen-VL, Gemma 4 and SmolVLM"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "path": "no.png"}]}, SAID]},
     r"messages\[0\].content\[0\]: '.*no.png' cannot be read"),
    ({"input_ids": [1, 2], "image": RED}, "has tokens .* and images"),
])
def test_rows_that_do_not_fit_are_refused(row, says, tokenizer):
  with pytest.raises(DataError, match=f"a.jsonl:1: .*{says}"):
    encode(row, tokenizer, configured("gemma"))


def test_a_template_that_hides_an_image_is_refused(tokenizer, tmp_path):
  last = write(tmp_path, "{{ 'q: ' + messages[-1 if messages[-1].role == 'user' else -2].content }} a: {{ (messages[-1]"
                         ".content if messages[-1].role == 'assistant' else '') }}{{ eos_token }}")
  row = {"images": [RED, BLUE], "messages": [{"role": "user", "content": "<image>"}, SAID,
                                             {"role": "user", "content": "<image>"}, SAID]}
  with pytest.raises(DataError, match="shows 1 of the conversation's 2 images"):
    ImageTemplate(ChatTemplate(open(last).read(), tokenizer.named_tokens), tokenizer,
                  ImageFormat(configured(), tokenizer)).render_spans(
        [{"role": "user", "content": [{"type": "image"}]}, SAID, {"role": "user", "content": [{"type": "image"}]}])
  with pytest.raises(DataError):
    encode(row, tokenizer, configured(last))


def test_bad_images_are_errors_or_counted(tokenizer):
  rows = [{"image": data, "prefix": "a", "suffix": "b"} for data in (RED, RED[:40], BLUE)]
  records = [Record("a", f"a.jsonl:{i}", row) for i, row in enumerate(rows, 1)]
  with pytest.raises(ImageError, match="^a.jsonl:2: image: 40 bytes .* a damaged or truncated image"):
    make_encoder(configured(), tokenizer, learns="conversations").encode(records)
  good, bad, other = make_encoder(configured(images=dict(on_error="drop")), tokenizer,
                                  learns="conversations").encode(records)
  assert bad == "a bad image" and [d.images[0].data for d in (good, other)] == [RED, BLUE]


def test_preferences_and_labelled_answers_have_the_images_of_the_prompt_on_each_side(tokenizer):
  pair = {"image": RED, "prompt": "what <image>?", "chosen": "red", "rejected": "blue"}
  (document,) = encode(pair, tokenizer, configured(strategy="dpo"))
  assert show(document, tokenizer) == (f"{BOS}what █?[red{EOS}]{BOS}what █?[blue{EOS}]", [RED, RED])
  first = {"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "what?"}]}
  implicit = {key: [first, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
  (document,) = encode(implicit, tokenizer, configured("plain", strategy="dpo"))
  assert show(document, tokenizer)[0].count("User: █what?") == 2 and len(document.images) == 2
  rows = [{"image": image, "prompt": "what?", "completion": answer, "label": True}
          for image, answer in ((RED, "red"), (BLUE, "blue"))]
  encoder = make_encoder(configured(strategy="kto"), tokenizer, learns="mismatched")
  one, two = encoder.encode([Record("a", "a", row) for row in rows])
  joined = encoder.with_next(one, two)
  assert show(joined, tokenizer)[0] == f"{BOS}█what?[red{EOS}]{BOS}█what?[blue{EOS}]"
  assert [image.data for image in joined.images] == [RED, RED]


@pytest.mark.parametrize("prompt", ["what <image>?", [{"role": "user", "content": "what <image>?"}]])
def test_rewarded_responses_have_the_images_of_their_prompt(prompt, tokenizer):
  row = {"image": RED, "prompt": prompt, "responses": ["red", list(b"blue")], "rewards": [1, 0]}
  text, tokens = encode(row, tokenizer, configured("plain", strategy="grpo"))
  said, images = show(text, tokenizer)
  assert images == [RED] == show(tokens, tokenizer)[1] and "what █?" in said
  assert show(tokens, tokenizer)[0].split("[")[1] == "blue]" and said.split("[")[1].strip().startswith("red")
  with pytest.raises(DataError, match="a.jsonl:1: has images, and a prompt of token ids"):
    encode(row | {"prompt": [1], "responses": [[2]], "rewards": [1]}, tokenizer, configured("plain", strategy="grpo"))


def test_prompts_carry_images_as_training_has_them(tokenizer, tmp_path):
  row = {"image": RED, "prefix": "what", "suffix": "red"}
  for config in (configured(attention="prefix"), configured()):
    (document,) = encode(row, tokenizer, config)
    prompt = Prompter(config, tokenizer).record(Record("a", "a", row))
    assert prompt.ids.tolist() == document.ids[:len(prompt.ids)].tolist() and prompt.image_places == document.places
    named = Prompter(config, tokenizer).record(Record("a", "a", row), "prefix", "suffix")
    assert named.ids.tolist() == prompt.ids.tolist() and named.images == prompt.images
    assert prompt.answer == "red" and prompt.images[0].tolist() == [[[200, 0, 0]] * 4] * 4
    asked = Prompter(config, tokenizer).ask(Record("a", "a", row))
    assert asked.columns == {"image", "prefix"} and Prompter(config, tokenizer).asked(asked, "a")[:2] == (
        pytest.approx(prompt.ids), "what\n")
  chat = {"messages": [{"role": "user", "content": PARTS[:2]}, SAID]}
  for template in ("gemma", write(tmp_path, GEMMA), write(tmp_path, LLAVA)):
    config = configured(template)
    (document,) = encode(chat, tokenizer, config)
    prompter = Prompter(config, tokenizer)
    for prompt in (prompter.record(Record("a", "a", chat)), prompter.messages(chat["messages"][:1]),
                   prompter.messages([{"role": "user", "content": "which of <image>"}], images=[RED])):
      assert prompt.ids.tolist() == document.ids[:len(prompt.ids)].tolist() and prompt.image_places == document.places
      assert prompt.images.encoded == (RED,)
  with pytest.raises(ConfigError, match="the model sees none"):
    Prompter(configured(tower="none"), tokenizer).text("a", images=[RED])


def test_what_a_text_model_does_with_images(tokenizer):
  with pytest.raises(DataError, match="has images, which the model does not see. Set config.model.vision.tower"):
    encode({"image": RED, "prompt": "a", "completion": "b"}, tokenizer, configured(tower="none"))
  with pytest.raises(DataError, match="none that are known"):
    encode({"prefix": "a", "suffix": "b"}, tokenizer, configured(tower="none"))


def test_texts_are_encoded_alike_with_and_without_a_tower(tokenizer):
  rows = [{"messages": [{"role": "user", "content": "a <image> b"}, SAID]}, {"prompt": "a <image>", "completion": "b"}]
  for row in rows:
    one, two = (encode(row, tokenizer, configured("gemma", tower=tower))[0] for tower in ("none", "clip"))
    assert one.ids.tolist() == two.ids.tolist() and one.weights.tolist() == two.weights.tolist()


@pytest.mark.parametrize("given, says", [
    (dict(vision=dict(image_token=None)), "image_token is not set.*<image> is 258"),
    (dict(chat=dict(images_at="end")), "images_at is 'end'; allowed: auto, bos, text"),
    (dict(images=dict(on_error="skip")), "on_error is 'skip'; allowed: error, drop"),
    (dict(chat=dict(image_marker="")), "image_marker is ''"), (dict(images=dict(resize="big")), "resize is 'big'")])
def test_options_that_are_not_allowed(given, says, tokenizer):
  vision = given.pop("vision", {})
  with pytest.raises(ConfigError, match=says):
    ImageFormat(configured(**given, **vision), tokenizer)


@pytest.mark.parametrize("tower, mean, fill", [
    ("siglip", (), (127, 127, 127)), ("clip", (), (122, 116, 104)), ("siglip", (0.1, 0.999, 0.5), (25, 254, 127))])
def test_what_surrounds_an_image_is_the_mean_cut_to_whole_numbers(tower, mean, fill):
  """As LLaVA's `expand2square` is given it: int(x * 255)."""
  config = defaults()
  config.model.vision.update(tower=tower, mean=mean)
  assert preprocess_of(config).fill == fill
