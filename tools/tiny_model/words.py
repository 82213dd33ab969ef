# ruff: noqa: SIM905 (split strings read better than lists of a hundred literals)
"""The words that `corpus.py` fills its templates with.

Beside the everyday words there are the words technical prose is made of, so that the tokenizer keeps them whole and
a fine-tune on signatures and docstrings starts from a model that has seen their kind of English.
"""

PEOPLE = "Ada Ben Clara Dan Emma Finn Grace Hugo Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tom Vera".split()
ANIMALS = "bird cat cow dog duck fish fox frog goat horse lion mouse owl pig rabbit sheep snake tiger wolf bear".split()
THINGS = (
    "apple ball bag bell boat book bottle box bread bridge cake car chair clock coat cup door flower garden glass hat "
    "house key lamp leaf letter map moon paper pen picture plate river road rope shoe spoon star stone table tree "
    "wall watch wheel window"
).split()
PLACES = "school market park beach forest kitchen library museum office station town village farm hill lake".split()
COLOURS = "black blue brown green grey orange pink purple red white yellow".split()
ADJECTIVES = "big small old new long short warm cold clean quiet bright dark heavy light round soft strong".split()
FEELINGS = "happy sad tired hungry calm proud busy glad sorry ready".split()
DID = "saw found liked took carried painted sold bought wanted lost kept made moved opened cleaned".split()
WENT = "walked ran went drove came hurried returned".split()
WHEN = "today yesterday later again often always sometimes early soon then".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()
OPPOSITES = {
    "big": "small", "hot": "cold", "up": "down", "day": "night", "old": "new", "long": "short", "left": "right",
    "open": "closed", "happy": "sad", "fast": "slow", "light": "dark", "early": "late", "full": "empty",
    "high": "low", "wet": "dry", "yes": "no",
}  # fmt: skip
SOUNDS = {"cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "sheep": "baa", "owl": "hoot", "pig": "oink"}

CODE_VERBS = (
    "add append apply build call change check clear close compare compute convert copy count create decode delete "
    "encode find flush format get handle insert install join load match merge move open parse print push read register "
    "remove rename replace reset resolve run save search seek select send set sort split start stop store strip test "
    "translate update validate wait walk wrap write"
).split()
CODE_NOUNS = (
    "address argument attribute buffer byte character child class client code command connection container context "
    "counter data date default descriptor dictionary directory element encoding entry error event exception "
    "expression field file filename flag folder format frame function handler hash header host index input instance "
    "integer interpreter item iterable iterator key keyword length level line list lock mapping message method "
    "mode module name node number object offset operation option order output package page parameter parent parser "
    "path pattern pointer port position prefix process program property queue record reference request resource "
    "response result sequence server session set signal size socket source stack state status stream string suffix "
    "symbol system table tag target task text thread time timeout token traceback tree tuple type user value variable "
    "version width window word"
).split()
CODE_ADJECTIVES = (
    "absolute abstract active additional available binary bound callable common complete corresponding current default "
    "different empty equal existing external final first following given hidden immutable initial internal invalid "
    "last local main mutable named nested new next normal numeric optional original other particular pending possible "
    "previous private public random raw relative required resulting same signed similar simple single sorted special "
    "specified standard temporary total unique unknown valid visible"
).split()
CODE_TYPES = "bool bytes dict float frozenset int list object set str tuple".split()
ERRORS = (
    "AttributeError EOFError ImportError IndexError KeyError LookupError NotImplementedError OSError RuntimeError "
    "StopIteration TimeoutError TypeError UnicodeDecodeError ValueError"
).split()
LITERALS = "None True False 0 1 -1 '' () 'utf-8' 'rb' 'r' 10 8192".split()
GLUE = (
    "about after all also although an and any are as at be because been before being between both but by can could "
    "does during each either else every example except for from had has have how however if in instead into is it its "
    "like made makes many may might more most must no not note of on once one only or other otherwise over rather see "
    "should since so some such than that the their them then there these they this those through to together true "
    "two under unless until upon use used useful uses using usually was were what when where whether which while who "
    "will with within without would you your"
).split()
