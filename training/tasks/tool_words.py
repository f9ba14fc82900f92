"""Words for the tasks with tools: cities, names of tools and parameters, and ways to ask."""

CITIES = (
    "Amsterdam", "Athens", "Bamako", "Bangkok", "Barcelona", "Berlin", "Bern", "Bogota", "Boston", "Cairo", "Chicago",
    "Dakar", "Delhi", "Dublin", "Geneva", "Hamburg", "Hanoi", "Helsinki", "Istanbul", "Jakarta", "Kyoto", "Lagos",
    "Lima", "Lisbon", "London", "Los Angeles", "Lyon", "Madrid", "Manila", "Melbourne", "Milan", "Montreal", "Moscow",
    "Mumbai", "Munich", "Nairobi", "Naples", "New York", "Oslo", "Paris", "Prague", "Rio de Janeiro", "Rome",
    "San Francisco", "Santiago", "Seattle", "Seoul", "Shanghai", "Singapore", "Sofia", "Stockholm", "Sydney", "Tokyo",
    "Toronto", "Tunis", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip

WEATHER_NAMES = (
    "get_weather", "get_weather", "get_weather", "get_current_weather", "get_current_weather", "weather",
    "current_weather", "weather_in", "lookup_weather", "get_forecast", "getWeather",
)  # fmt: skip
TIME_NAMES = ("get_time", "get_time", "get_current_time", "time_in", "local_time", "getTime")
KEYS = ("city", "city", "location", "location", "place", "town", "city_name")
PLACE_NOTES = ("The city", "City name", "The city and state, e.g. San Francisco, CA", "Where", "The name of the city")
DESCRIPTIONS = (
    "Get the weather", "The weather in a city", "Get the current weather in a given location",
    "Returns the weather for a city.", "Get current weather", "Weather of a place",
)  # fmt: skip
SKIES = ("sunny", "rain", "cloudy", "snow", "foggy", "windy", "clear sky", "light rain", "It is raining", "storm")

WEATHER_QUESTIONS = (
    "what is the weather in {}", "what is the weather in {}", "what's the weather in {}", "how is the weather in {}",
    "what is the weather like in {}", "what's the weather like in {}", "tell me the weather in {}",
    "what is the current weather in {}", "how is the weather in {} today", "what's the weather like in {} today",
    "the weather in {}", "show me the weather in {}", "can you tell me the weather in {}", "is it raining in {}",
    "how warm is it in {}", "what is the weather in {} right now", "how's the weather in {}",
)  # fmt: skip
TIME_QUESTIONS = (
    "what time is it in {}", "what is the time in {}", "tell me the time in {}", "what's the time in {}",
    "what time is it now in {}", "how late is it in {}",
)  # fmt: skip
LOOK_UP = (
    "what is the value of {name}({x})? Use the tool", "call {name} with {x}", "use {name} with {x}",
    "use the tool {name} with {x}", "run {name} on {x}", "what is {name} of {x}", "what does {name} return for {x}",
    "apply {name} to {x}", "please call {name} for {x}", "use {name} for {x}",
)  # fmt: skip
