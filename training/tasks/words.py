"""Words for the tasks that copy, spell and reverse; invented ones make the model learn to copy, not the list."""

import random

WORDS = tuple(
    """
    able acre air amber anchor angle ant apple apricot april arch arm arrow art ash atlas autumn axe baker
    banana barley barn basket bay beach bean bear bed bee bell berry bird blue boat bone book boot bottle bow
    box branch brass bread brick bridge broom brown brush bucket bud bus butter button cabin cactus cake camel
    candle cape car carrot castle cat chair chalk cheese cherry chest circle clay clock cloud clover coal coat
    cobalt coin comet copper coral corn cotton cow crane cream cricket crow crown cup daisy dance dawn day deer
    desert desk diamond dog donkey door dove dragon dream drum duck dune dust eagle earth east echo egg elbow
    elm ember engine evening falcon fan farm feather fence fern field fig finch fire fish flag flame flint flour
    flower flute fog forest fork fox frog frost fruit garden garlic gate ginger glass globe goat gold goose
    grain grape grass gravel green grove hall hammer harbor hare harvest hat hawk hay hazel heart heron hill
    honey hook horn horse house ice inch ink iron island ivory ivy jacket jade jam jar jewel juice june jungle
    kettle key king kite kitten knife ladder lake lamp lantern lark laurel leaf lemon lettuce library light lily
    lime linen lion lizard lotus magnet maple marble march market meadow melon metal milk mill mint mirror moon
    morning moss moth mountain mouse music nail nectar needle nest net night north nut oak oat ocean olive onion
    opal orange orbit orchard otter oven owl ox paint palm panda paper parrot path peach pear pearl pebble pen
    pencil pepper piano pigeon pillow pine planet plate plough plow plum pocket pond poppy potato prairie
    pumpkin purple quail quartz queen quilt rabbit radish rain raven reed ribbon rice ridge ring river road
    robin rock roof root rope rose row ruby rye sail salt sand school sea shade sheep shell shelf ship shoe silk
    silver sky sled sleep smoke snail snow soap soil song soup south spade spark sparrow spoon spring spruce
    squash stable star stem stone storm stove straw stream street sugar summer sun swan table tea tent thorn
    thunder tiger timber tin toad tomato tower town track train tree trout tulip tunnel turnip turtle valley
    vase velvet village vine violet violin wagon walnut water wave wax well west whale wheat wheel willow wind
    window wine wing winter wolf wood wool worm wren yard yarn year yellow zebra
    """.split()  # noqa: SIM905 - reads better than four hundred quoted words
)

NAMES = tuple(
    """
    Ada Adam Aisha Alan Alice Amir Ana Andrea Anna Anton Ben Bella Boris Carla Carlos Carol Chen Chloe Clara
    Daniel David Diana Dora Edith Elena Eli Emil Emma Erik Eva Felix Fiona Frank Freya George Grace Greta Hana
    Hannah Hugo Ida Igor Ines Iris Ivan Jack James Jane Jonas Julia Karl Kate Kenji Kim Lars Laura Lea Leo Lily
    Linda Lucas Lucy Luis Maria Mark Marta Max Maya Mia Milan Mina Nadia Nina Noah Nora Olga Oliver Omar Oscar
    Otto Paul Peter Petra Priya Rahul Rita Robert Rosa Ruth Sam Sara Simon Sofia Stefan Tara Theo Thomas Tina
    Tom Uma Vera Victor Walter Wanda Wei Yara Yuki Zoe
    """.split()  # noqa: SIM905 - reads better than four hundred quoted words
)

ANIMALS = (
    "bear", "cat", "cow", "deer", "dog", "donkey", "duck", "eagle", "fox", "frog", "goat", "goose", "hare", "horse",
    "lion", "mouse", "otter", "owl", "panda", "rabbit", "sheep", "snail", "tiger", "turtle", "whale", "wolf",
)  # fmt: skip

EMOJI = ("🙂", "🌾", "🚜", "🌻", "🎉", "🐄", "🌧", "🥕")

_ONSETS = (
    "b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "ch", "cl",
    "dr", "fl", "gr", "pl", "pr", "qu", "sh", "sl", "st", "th", "tr", "",
)  # fmt: skip
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ee", "oo", "ou", "y")
_CODAS = ("", "", "b", "d", "g", "l", "m", "n", "p", "r", "s", "t", "x", "ck", "ll", "nd", "ng", "rk", "rn", "st", "w")


def invented(rng: random.Random) -> str:
    """A word of one to three syllables that probably does not exist."""
    syllables = rng.choices((1, 2, 3), weights=(3, 5, 1))[0]
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def any_word(rng: random.Random, invented_share: float = 0.3) -> str:
    """A word of the list, or an invented one."""
    return invented(rng) if rng.random() < invented_share else rng.choice(WORDS)


def any_name(rng: random.Random) -> str:
    """A first name, at times an invented one."""
    return invented(rng).capitalize() if rng.random() < 0.3 else rng.choice(NAMES)
