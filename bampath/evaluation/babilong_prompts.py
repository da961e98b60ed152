"""The prompts of BABILong's qa1 … qa5, word for word (booydar/babilong, Apache-2.0): oddities included."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TaskPrompt:
    """Instruction, solved examples and the demanded form of the answer."""

    instruction: str
    examples: str
    post_prompt: str


TEMPLATE = "{instruction}\n\n{examples}\n\n{post_prompt}\n\n<context>\n{context}\n</context>\n\nQuestion: {question}"


def _example(text: str) -> str:
    return f"<example>\n{text}\n</example>"


_BASED = "You need to answer the question based only on the information from the facts."
_ITEMS = (
    "If a person got an item in the first location and travelled to the second location the item is also in the second "
    "location. If a person dropped an item in the first location and moved to the second location the item remains in "
    "the first location."
)
_HIDDEN = "hidden in some random text and a question."
_PLACES_ITEMS = f"I give you context with the facts about locations and actions of different persons {_HIDDEN}"

PROMPTS = {
    "qa1": TaskPrompt(
        f"I will give you context with the facts about positions of different persons {_HIDDEN} {_BASED} "
        "If a person was "
        "in different locations, use the latest location to answer the question.",
        _example(
            "Charlie went to the hallway. Judith come back to the kitchen. Charlie travelled to balcony. Where is "
            "Charlie?\nAnswer: The most recent location of Charlie is balcony."
        )
        + "\n\n"
        + _example(
            "Alan moved to the garage. Charlie went to the beach. Alan went to the shop. Rouse travelled to balcony. "
            "Where is Alan?\nAnswer: The most recent location of Alan is shop."
        ),
        "Always return your answer in the following format: The most recent location of ’person’ is ’location’. Do not "
        "write anything else after that.",
    ),
    "qa2": TaskPrompt(
        f"{_PLACES_ITEMS}{_BASED}\n{_ITEMS}",
        _example(
            "Charlie went to the kitchen. Charlie got a bottle. Charlie moved to the balcony. Where is the bottle?\n"
            "Answer: The bottle is in the balcony."
        )
        + "\n"
        + _example(
            "Alan moved to the garage. Alan got a screw driver. Alan moved to the kitchen. Where is the screw driver?\n"
            "Answer: The screw driver is in the kitchen."
        ),
        "Always return your answer in the following format: The ’item’ is in ’location’. Do not write anything else "
        "after that.",
    ),
    "qa3": TaskPrompt(
        f"{_PLACES_ITEMS} {_BASED}\n{_ITEMS}",
        _example(
            "John journeyed to the bedroom. Mary grabbed the apple. Mary went back to the bathroom. Daniel journeyed "
            "to the bedroom. Daniel moved to the garden. Mary travelled to the kitchen. Where was the apple before the "
            "kitchen?\nAnswer: Before the kitchen the apple was in the bathroom."
        )
        + "\n"
        + _example(
            "John went back to the bedroom. John went back to the garden. John went back to the kitchen. Sandra took "
            "the football. Sandra travelled to the garden. Sandra journeyed to the bedroom. Where was the football "
            "before the bedroom?\nAnswer: Before the bedroom the football was in the garden."
        ),
        "Always return your answer in the following format: Before the $location_1$ the $item$ was in the "
        "$location_2$. Do not write anything else after that.",
    ),
    "qa4": TaskPrompt(
        "I will give you context with the facts about different people, their location and actions, "
        f"{_HIDDEN} {_BASED}",
        _example(
            "The hallway is south of the kitchen. The bedroom is north of the kitchen. What is the kitchen south of?\n"
            "Answer: bedroom"
        )
        + "\n"
        + _example(
            "The garden is west of the bedroom. The bedroom is west of the kitchen. What is west of the bedroom?\n"
            "Answer: garden"
        ),
        "Your answer should contain only one word - location. Do not write anything else after that.",
    ),
    "qa5": TaskPrompt(
        f"I will give you context with the facts about locations and their relations {_HIDDEN} {_BASED}",
        "\n".join(
            (
                _example(
                    "Mary picked up the apple there. Mary gave the apple to Fred. Mary moved to the bedroom. Bill took "
                    "the milk there. Who did Mary give the apple to?\nAnswer: Fred"
                ),
                _example(
                    "Jeff took the football there. Jeff passed the football to Fred. Jeff got the milk there. Bill "
                    "travelled to the bedroom. Who gave the football?\nAnswer: Jeff"
                ),
                _example(
                    "Fred picked up the apple there. Fred handed the apple to Bill. Bill journeyed to the bedroom. "
                    "Jeff went back to the garden. What did Fred give to Bill?\nAnswer: apple"
                ),
            )
        ),
        "Your answer should contain only one word. Do not write anything else after that. Do not explain your answer.",
    ),
}
_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
LABELS = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4"), _PLACES),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
}
