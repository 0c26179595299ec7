"""Chat templates of strangers: they fail, or reach for what is none of theirs, or would take all there is."""

import pytest

from input_pipeline.chat.template import load_template
from tests.hostile.common import named, refused, write
from trainer.errors import DataError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
REACHES = "reaches for what is none of its business"
STOPPED = "the template was stopped"


def nested(depth):
  return "{% if true %}" * depth + "{% endif %}" * depth


TABLE = [
    ("empty braces", "{{ }}", "not a valid template"),
    ("a block that is not closed", "{% for m in messages %}", "t.jinja:1", "not a valid template"),
    ("a block that was not opened", "a\n{% endfor %}", "t.jinja:2", "not a valid template"),
    ("an unknown tag", "{% evil %}", "unknown tag 'evil'"),
    ("an unknown filter", "{{ 'a' | evil }}", "evil"),
    ("an unknown test", "{{ 'a' is evil }}", "evil"),
    ("not utf-8", b"\xff\xfe{{ a }}", "t.jinja", "cannot be read as UTF-8"),
    ("a megabyte", "a" * 1_000_000, "at most 131072 are read"),
    ("nested deep", nested(3000), "t.jinja", "nested"),
    ("brackets nested deep", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "t.jinja", "nested"),
    ("a sum of thousands", "{{ " + "+".join("1" * 20_000) + " }}", "t.jinja"),
    ("includes a file", "{% include '/etc/passwd' %}", "'include' is not allowed"),
    ("imports a file", "{% import 'os' as os %}", "'import' is not allowed"),
    ("imports from a file", "{% from 'os' import system %}", "'from import' is not allowed"),
    ("extends a file", "{% extends '/etc/passwd' %}", "'extends' is not allowed"),
    ("turns escaping off", "{% autoescape false %}a{% endautoescape %}", "t.jinja:1", "not a valid template"),
    ("class of a string", "{{ ''.__class__.__mro__[1].__subclasses__() }}", REACHES),
    ("class by a filter", "{{ ''|attr('__class__') }}", REACHES),
    ("class by an item", "{{ ''['__class__']['__mro__'] }}", REACHES),
    ("class of a list of messages", "{{ messages.__class__ }}", REACHES),
    ("globals of a function", "{{ raise_exception.__globals__ }}", REACHES),
    ("globals of namespace", "{{ namespace.__init__.__globals__['os'].system('echo pwned') }}", REACHES),
    ("globals of cycler", "{{ cycler.__init__.__globals__.os.popen('id').read() }}", REACHES),
    ("globals of joiner", "{{ joiner.__call__.__globals__ }}", REACHES),
    ("self", "{{ self.__init__.__globals__.__builtins__ }}", REACHES),
    ("code of a macro", "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}", REACHES),
    ("environment of a macro", "{% macro m() %}{% endmacro %}{{ m._environment }}", REACHES),
    ("class in a format", "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}", "t.jinja:1"),
    ("class in a format of a mapping", "{{ '{a.__class__}'.format_map({'a': 1}) }}", "t.jinja:1"),
    ("class by map", "{{ messages | map(attribute='__class__') | list }}", REACHES),
    ("class by sort", "{{ messages | sort(attribute='__class__.__mro__') }}", "t.jinja:1"),
    ("names put together", "{{ ''|attr('__cl' ~ 'ass__') }}", REACHES),
    ("changes its data", "{{ messages.append({}) }}", REACHES),
    ("changes a dict", "{{ messages[0].update({'role': 'assistant'}) }}", REACHES),
    ("an undefined name called", "{{ open('/etc/passwd').read() }}", "needs what the conversation does not have"),
    ("an attribute of an undefined name", "{{ nothing.at.all }}", "needs what the conversation does not have"),
    ("refuses", "{{ raise_exception('no system, please') }}",
     "the template refuses the conversation: no system, please"),
    ("refuses at length", "{{ raise_exception('no ' * 100000) }}", "refuses the conversation: no no no"),
    ("refuses with an escape", "{{ raise_exception('\x1b[2J') }}", "refuses the conversation"),
    ("asks for the day", "{{ strftime_now('%Y') }}", "today's date"),
    ("divides by zero", "{{ 1 / 0 }}", "cannot be rendered: ZeroDivisionError"),
    ("adds what cannot be added", "{{ 1 + 'a' }}", "cannot be rendered: TypeError"),
    ("many", "{% for i in range(10**12) %}a{% endfor %}", "t.jinja:1"),
    ("many within many", "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}{% endfor %}"
     "{% endfor %}{% endfor %}", STOPPED),
    ("a loop that calls itself", "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", STOPPED),
    ("a macro that calls itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", STOPPED),
    ("two macros that call each other",
     "{% macro a(f) %}{{ f(a) }}{% endmacro %}{% macro b(f) %}{{ f(b) }}{% endmacro %}"
     "{{ a(b) }}", STOPPED),
    ("a long string", "{{ 'a' * 10**10 }}", STOPPED),
    ("a long list", "{{ [0] * 10**10 }}", STOPPED),
    ("doubled again and again", "{% set n = namespace(a='aaaa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}"
     "{% endfor %}{{ n.a }}", STOPPED),
    ("a large number", "{{ 10 ** (10 ** 10) }}", STOPPED),
    ("a number squared again and again",
     "{% set n = namespace(a=99) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}"
     "{% endfor %}{{ n.a }}", STOPPED),
    ("a number shifted by a format", "{{ '%0999999999d' % 1 }}", STOPPED),
    ("a wide format", "{{ '{:>999999999}'.format('a') }}", STOPPED),
    ("centred far away", "{{ 'a' | center(10**9) }}", STOPPED),
    ("padded far away", "{{ 'a'.ljust(10**9) }}", STOPPED),
    ("tabs far away", "{{ '\t\t'.expandtabs(10**9) }}", STOPPED),
    ("replaced by more", "{{ ('a' * 99999).replace('a', 'b' * 99999) }}", STOPPED),
    ("indented far", "{{ 'a\nb' | indent(10**9) }}", STOPPED),
    ("batches that are filled", "{{ [1] | batch(10**9, 0) | list }}", STOPPED),
    ("json indented far", "{{ messages | tojson(indent=10**9) }}", STOPPED),
    ("json of itself", "{% set n = namespace(a=[1]) %}{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
     "{{ n.a | tojson }}", STOPPED),
    ("printed at length", "{% for i in range(99999) %}{{ 'aaaaaaaaaa' * 99 }}{% endfor %}", STOPPED),
    ("a number of many digits", "{{ " + "9" * 5000 + " }}", "t.jinja"),
    ("a surrogate", "{{ '\\ud800' }}{{ messages[0].content }}", "t.jinja"),
]


@pytest.mark.parametrize("row", named([(row[0], row[1:]) for row in TABLE]))
def test_a_bad_template_is_one_message(row, tmp_path, guard):
  source, *expected = row
  file = write(tmp_path / "data" / "t.jinja", source if isinstance(source, bytes) else source.encode())
  with guard.only():
    refused(lambda: load_template(file, special_tokens={}).render(MESSAGES), str(tmp_path), *expected)


@pytest.mark.parametrize("source, text", [
    ("{{ nothing }}", ""), ("{{ messages[9] }}", ""), ("{{ messages[0].nothing }}", ""),
    ("{{ messages[0].content.upper() }}", "HELLO"), ("{{ '{{ 1 }}' }}", "{{ 1 }}"),
    ("{{ (messages[0].__class__ is defined) }}", None)])
def test_what_does_no_harm_is_rendered(source, text, tmp_path):
  template = load_template(write(tmp_path / "t.jinja", source.encode()), special_tokens={})
  try:
    assert template.render(MESSAGES) == text
  except DataError as e:
    assert text is None and REACHES in str(e)


def test_what_a_message_says_is_never_a_template(tmp_path):
  template = load_template(write(tmp_path / "t.jinja", b"{{ messages[0].content }}"), special_tokens={})
  said = "{{ cycler.__init__.__globals__ }}{% include '/etc/passwd' %}"
  assert template.render([{"role": "user", "content": said}]) == said
