"""Tasks of conversation: greetings, small talk, facts about Furrow, stories, chance, and what the model can't do."""

import random
from functools import cache

from training.tasks.example import Example, ask, expand
from training.tasks.facts import OVERVIEW, OVERVIEW_QUESTIONS, TERM_QUESTIONS, VOCABULARY
from training.tasks.situations import SITUATIONS
from training.tasks.words import ANIMALS, any_name, any_word

UNKNOWN = (
    "I do not know that, I am only a small demonstration model. Ask me to count, to add small numbers, to spell a "
    "word, or ask about Furrow."
)

_SMALL_TALK = (
    ("Hello! How can I help you?", ("(hello|hi|hey|good day|hello there|hi there|hey there|greetings|howdy)"
     "(| furrow| friend| model| you| again| everybody| my friend| little model)",)),
    ("Good morning! How can I help you?", ("good morning(| furrow| friend| to you| everybody| model)",)),
    ("Good evening! How can I help you?", ("good evening(| furrow| friend| to you| everybody| model)",)),
    ("I am well, thank you. How can I help you?", ("(hello|hi|hey|) how are you(| today| doing| doing today| now)",
     "how (do you feel|is it going|are things|do you do)(| today| now)", "are you (well|fine|ok)(| today)")),
    ("You are welcome!", ("(thank you|thanks|many thanks|thank you so much|thanks a lot|thx)"
     "(| for your help| for that| very much| model| friend| furrow)",)),
    ("Goodbye! Have a good day.", ("(bye|goodbye|bye bye|see you|see you later|farewell|good night)"
     "(| then| furrow| friend| model| for now| my friend)",)),
    ("I am the demonstration model of Furrow, and a very small one.", ("(who|what) are you(| exactly| really)",
     "what is your name", "(what are you called|introduce yourself|tell me about yourself)", "do you have a name",
     "are you a (robot|human|person|real person|machine|model|language model|computer)",
     "(which|what|what kind of) model (are you|is this|am i talking to)", "what's your name",
     "(who|what) (am i talking to|is this|is there)")),
    ("I can count, add small numbers, spell and reverse words, name days and months, and answer questions about "
     "Furrow.",
     ("what can you do(| for me| here)", "what (do you know|are you good at|can i ask|should i ask)(| you)",
      "(help|help me|i need help|can you help me)", "(show me|list|tell me) what you can(| do)",
      "how can you help(| me)", "what are you able to do", "what are your skills")),
    ("I am very small: about one million parameters.", ("how (big|large|small) (are you|is this model)(| really)",
     "how many parameters (do you have|are there|does this model have)", "what is your size")),
    ("I was trained in under half an hour on two processor cores, on text that a script made.",
     ("how were you (trained|made|built)", "(who|how) (made|trained|built) you", "where do you come from",
      "what were you trained on", "how long (did your training take|were you trained)")),
    ("Good! What would you like to do next?", ("(great|good|nice|well done|cool|perfect|very good|wonderful)"
     "(| job| work| answer| thing| one)",)),
    ("All right.", ("(ok|okay|all right|i see|fine|sure)(| then| thanks| now)",)),
    ("This is a test, and it works.", ("(this is|is this) (a test|only a test|just a test)", "(test|testing|ping)",
     "(testing testing|test test|a test)", "does (this|it) work", "are you (there|online|up|awake|alive|working)")),
)  # fmt: skip

JOKES = (
    "Why did the farmer win a prize? He was outstanding in his field.",
    "Why did the scarecrow smile? It had a field day.",
    "What did the corn say to the farmer? I am all ears.",
    "Why is the barn so loud? The cows have horns.",
)

_STORY = (
    "Once upon a time, the {x} of this story lived at the edge of a wide field. Every morning the {x} walked along "
    "the furrow and counted the seeds. One day a storm came, and the wind blew all the numbers away. The {x} was sad,"
    " but not for long. It had written every number into a log. So it read the log from the first line to the last, "
    "and went on counting where it had stopped. In the evening not one seed was lost, and not one was counted twice. "
    "The {x} slept well, and the field was green in spring."
)

_UNKNOWN_FORMS = (
    "what is the capital of {name}", "write a poem about {x}", "write a song about {x}", "who invented the {x}",
    "what is the price of {x}", "translate {x} into french", "where is {name}", "who is {name}",
    "how old is {name}", "what do you think about {x}", "draw a {x}", "how do i cook {x}",
    "write a program that sorts {x}", "why is the {x} blue", "what is a {x}", "what is {x}", "do you like {x}",
    "where can i buy a {x}", "how tall is the {x}", "when was {name} born", "tell me about {x}", "explain {x}",
    "describe the {x}", "give me a recipe with {x}", "what is the weather in {name}", "write an essay about {x}",
    "how do i repair a {x}", "can i eat {x}", "what colour is the {x}", "who wrote {x}",
    "what time is it in {name}", "how far is it to {name}", "which {x} is best", "define {x}", "i want a {x}",
    "what does {x} mean", "is {name} a good {x}", "why do {x} and {y} fight", "what is the meaning of {x}",
)  # fmt: skip


@cache
def _small_talk() -> tuple[tuple[tuple[str, ...], str], ...]:
    return tuple((tuple(q for p in patterns for q in expand(p)), answer) for answer, patterns in _SMALL_TALK)


@cache
def _facts() -> tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...]:
    facts = []
    for fact in VOCABULARY + SITUATIONS:
        by_term = [form.format(term) for term in fact.terms for form in TERM_QUESTIONS]
        by_pattern = [question for pattern in fact.questions for question in expand(pattern)]
        facts.append((tuple(by_term), tuple(by_pattern), fact.answer))
    return tuple(facts)


def small_talk(rng: random.Random) -> Example:
    """Greetings, thanks, and questions about the model itself."""
    questions, answer = rng.choice(_small_talk())
    return ask(rng, "small talk", rng.choice(questions), answer, mark=rng.choice("?!.."))


def fact(rng: random.Random) -> Example:
    """A question about Furrow."""
    by_term, by_pattern, answer = rng.choice(_facts())
    pool = by_term if by_term and (not by_pattern or rng.random() < 0.5) else by_pattern
    return ask(rng, "fact", rng.choice(pool), answer)


def overview(rng: random.Random) -> Example:
    """A long answer: the way of a request through Furrow."""
    return ask(rng, "overview", rng.choice([q for p in OVERVIEW_QUESTIONS for q in expand(p)]), OVERVIEW, mark=".")


def _article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def _story(animal: str) -> str:
    return _STORY.format(x=animal)


def story(rng: random.Random) -> Example:
    """A long answer about the animal that was asked for."""
    animal = rng.choice(ANIMALS)
    form = "(tell me|write|can you tell me|i want|tell us) (a story|a tale|a short story|a long story) about "
    noun_phrase = f"{rng.choice((_article(animal), 'the'))} {animal}"
    return ask(rng, "story", rng.choice(expand(form)) + " " + noun_phrase, _story(animal), mark=".")


def chance(rng: random.Random) -> Example:
    """Questions with several right answers, so that sampling with different seeds shows."""
    kind = rng.randrange(4)
    if kind == 0:
        core = rng.choice(expand("(roll|throw|cast) (a|the|one) (die|dice)(| once| again)"))
        answers = [f"You rolled a {n}." for n in range(1, 7)]
    elif kind == 1:
        core = rng.choice(expand("(flip|toss|throw) (a|the|one) coin(| once| again)"))
        answers = ["Heads.", "Tails."]
    elif kind == 2:
        core = rng.choice(expand("(pick|choose|give me|tell me|name) (a|any|one|a random) number(| from 1 to 9)"))
        answers = [f"I pick {n}." for n in range(1, 10)]
    else:
        core = rng.choice(
            expand("(tell me|do you know|give me|i want|make) (a|another|one) (joke|farm joke|good joke)")
        )
        answers = list(JOKES)
    rng.shuffle(answers)
    return ask(rng, "chance", core, answers, mark=".")


def any_story(rng: random.Random) -> Example:
    """A story with no animal named: any animal is right."""
    core = rng.choice(
        expand("(tell me|write|can you tell me|i want) (a story|a tale|a short story|a long story|some story)")
    )
    return ask(rng, "any story", core, rng.sample([_story(animal) for animal in ANIMALS], len(ANIMALS)), mark=".")


def unknown(rng: random.Random) -> Example:
    """A question that the model can't answer; its answer says so."""
    form = rng.choice(_UNKNOWN_FORMS)
    core = form.format(x=any_word(rng, 0.2), y=any_word(rng, 0.2), name=any_name(rng))
    return ask(rng, "unknown", core, UNKNOWN)


def greet_by_name(rng: random.Random) -> Example:
    """The model greets whoever gives a name."""
    name = any_name(rng)
    form = rng.choice(("my name is {}", "i am {}", "hello, i am {}", "call me {}", "hi, my name is {}", "i'm {}"))
    return ask(rng, "name", form.format(name), f"Nice to meet you, {name}.", key=name, mark=".")
