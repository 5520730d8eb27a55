"""Guards: pairs that must never share an answer, each with the guard that says so, and pairs that must get through."""

from __future__ import annotations

import time

import pytest

from policies.similarity import answer_tells, hard, veto
from policies.similarity.numerals import in_digits
from policies.similarity.polarity import negated
from policies.similarity.quantities import scan
from policies.similarity.text import read

DIFFERENT = [
    # numbers, in digits and in words
    ("Who won the cup in 2020?", "Who won the cup in 2021?", "numbers"),
    ("Convert 10 % to a fraction", "Convert 20 % to a fraction", "numbers"),
    ("What is 10 of 50?", "What is 10% of 50?", "numbers"),
    ("Is port 6379 open?", "Is port 6380 open?", "numbers"),
    ("List three planets", "List four planets", "numbers"),
    ("the thirteenth president", "the fourteenth president", "numbers"),
    ("the fortieth day", "the fiftieth day", "numbers"),
    ("What is 1+1?", "What is 1+2?", "numbers"),
    ("What is 7 - 3?", "What is 7 + 3?", "numbers"),
    ("7 minus 3", "3 minus 7", "numbers"),
    ("7 minus 3", "7 plus 3", "numbers"),
    ("minus 40 degrees", "40 degrees", "numbers"),
    ("–40 degrees", "40 degrees", "numbers"),
    ("is it -5 degrees", "is it 5 degrees", "numbers"),
    ("take .5 mg", "take 5 mg", "numbers"),
    ("5 million people", "5 billion people", "numbers"),
    ("a million people", "a billion people", "numbers"),
    ("a hundred and five", "five", "numbers"),
    ("half of it", "a quarter of it", "numbers"),
    ("x²", "x³", "numbers"),
    ("½ cup", "¼ cup", "numbers"),
    ("1,000 users", "10,000 users", "numbers"),
    ("2k tokens", "2 tokens", "numbers"),
    ("World War I", "World War II", "numbers"),
    ("How did Louis XIV die?", "How did Louis XVI die?", "numbers"),
    # units, currencies, versions, dates, times
    ("a disk of 1.5GB", "a disk of 5.1GB", "numbers"),
    ("a 5 kg turkey", "a 5 lb turkey", "numbers"),
    ("Ibuprofen for a 3 month old", "Ibuprofen for a 3 year old", "numbers"),
    ("is 300 euros enough", "is 300 dollars enough", "numbers"),
    ("worth $3B", "worth $3M", "numbers"),
    ("1 MB", "1 Mb", "numbers"),
    ("version 1.2.3", "version 1.3.2", "numbers"),
    ("192.168.0.1", "192.168.1.0", "numbers"),
    ("error 0x8024402C", "error 0x8024402F", "numbers"),
    ("2024-01-02", "2024-02-01", "numbers"),
    ("at 10:05", "at 5:10", "numbers"),
    ("at 3 am", "at 3 pm", "numbers"),
    ("born on June 1", "born on July 1", "numbers"),
    ("How large is Texas in square miles?", "How large is Texas in square kilometres?", "units"),
    ("How long is a marathon in km?", "How long is a marathon in miles?", "units"),
    ("buses on Saturday", "buses on Sunday", "calendar"),
    ("Which fruits are in season in January?", "Which fruits are in season in July?", "calendar"),
    # what stands there letter by letter
    ('Translate "good night" into French', 'Translate "good day" into French', "verbatim"),
    ("open https://a.example/x", "open https://a.example/y", "verbatim"),
    ("what does user_id do", "what does user_name do", "verbatim"),
    ("edit /etc/hosts", "edit /etc/passwd", "verbatim"),
    ("curl -o", "curl -O", "verbatim"),
    ("a quicksort in C++", "a quicksort in C#", "verbatim"),
    ("follow @alice", "follow @bob", "verbatim"),
    ("what does os.path do", "what does os.name do", "verbatim"),
    # negation and its scope
    ("Is it safe to eat?", "Is it not safe to eat?", "negation"),
    ("Why does it start?", "Why doesn't it start?", "negation"),
    ("Why does it start?", "Why doesn’t it start?", "negation"),
    ("Why does it start?", "Why doesn´t it start?", "negation"),
    ("Why does it start?", "Why doesn‘t it start?", "negation"),
    ("pasta with cheese", "pasta without cheese", "negation"),
    ("rules for smokers", "rules for non-smokers", "negation"),
    ("not mammals but lay eggs", "mammals but do not lay eggs", "negation"),
    ("Can I smoke here?", "Can I never smoke here?", "negation"),
    ("can i pay", "cant i pay", "negation"),
    ("I can't log in, why do you ask?", "I can't log in, why don't you ask?", "negation"),
    ("vaccinated dog bit a child", "unvaccinated dog bit a child", "negation"),
    ("Pay a registered contractor", "Pay an unregistered contractor", "negation"),
    ("delete the branch if it is merged", "delete the branch unless it is merged", "negation"),
    # antonyms, particles, comparatives, quantifiers
    ("How do I enable dark mode?", "How do I disable dark mode?", "antonym"),
    ("How do I turn on dark mode?", "How do I turn off dark mode?", "antonym"),
    ("Is port 6379 open?", "Is port 6379 closed?", "antonym"),
    ("Which sofas are in stock?", "Which sofas are out of stock?", "antonym"),
    ("How do I scale up my nodes?", "How do I scale down my nodes?", "antonym"),
    ("numbers smaller than ten", "numbers larger than ten", "antonym"),
    ("Give arguments for school uniforms", "Give arguments against school uniforms", "antonym"),
    ("Who was president before Lincoln?", "Who was president after Lincoln?", "antonym"),
    ("rows where price is greater than 100", "rows where price is less than 100", "antonym"),
    ("Which breeds grow to at least 30 kg?", "Which breeds weigh at most 30 kg?", "antonym"),
    ("the cheapest region", "the most expensive region", "antonym"),
    ("Are most metals solid?", "Is each metal a solid?", "quantifier"),
    ("Are all flights cancelled?", "Are any flights cancelled?", "quantifier"),
    # what kind of answer, and in which form
    ("Who invented the QR code?", "Why was the QR code invented?", "kind"),
    ("Where did Hendrix die?", "When did Hendrix die?", "kind"),
    ("How do I prune a fig tree?", "When do I prune a fig tree?", "kind"),
    ("Where is the hosts file?", "What is the hosts file?", "kind"),
    ("Does chiropractic work?", "How does chiropractic work?", "kind"),
    ("Should Tibet gain independence?", "How can Tibet gain independence?", "kind"),
    ("How do I clean a keyboard?", "How often do I clean a keyboard?", "kind"),
    ("Describe CPR in French", "Describe CPR in German", "form"),
    ("What is the water cycle?", "Explain the water cycle in Spanish please", "form"),
    ("Explain OAuth", "Explain OAuth in one sentence", "form"),
    ("Name the planets", "Name the planets as JSON", "form"),
    ("Explain vaccines", "Explain vaccines step by step", "form"),
    ("How does TCP work?", "Briefly, how does TCP work?", "form"),
    # direction, order, roles
    ("Migrate from Gmail to Proton", "Migrate from Proton to Gmail", "order"),
    ("Convert USD to EUR", "Convert EUR to USD", "order"),
    ("merge develop into main", "merge main into develop", "order"),
    ("Is Paris bigger than London?", "Is London bigger than Paris?", "order"),
    ("Did Wagner influence Nietzsche?", "Did Nietzsche influence Wagner?", "order"),
    ("Which musicians were influenced by Dylan?", "Which musicians influenced Dylan?", "order"),
    ("Can I put my dog's treatment on my cat?", "Can I put my cat's treatment on my dog?", "order"),
    ("Subtract 48 from 120", "Subtract 120 from 48", "order"),
    ("money from Poland to the US", "money from the US to Poland", "order"),
    ("review my changes", "review your changes", "role"),
    ("As a student, how do I appeal?", "As an examiner, how do I appeal?", "role"),
    # names and what is added or exchanged
    ("How do I do this in MySQL?", "How do I do this in Oracle Database?", "names"),
    ("How many moons does Jupiter have?", "How many moons does Saturn have?", "names"),
    ("function of a television", "function of money", "word"),
    ("longest river in Europe", "longest river", "scope"),
    ("Which tennis players won?", "Which unseeded tennis players won?", "scope"),
    # languages that the word lists do not know: the same words, or nothing
    ("Cuántos años tiene María", "Cuántos anos tiene María", "language"),
    ("Wie koche ich Reis im Topf", "Wie koche ich Nudeln im Topf", "language"),
]
SAME = [
    ("What is 1000 in binary?", "What is 1,000 in binary?"),
    ("one thousand users", "1000 users"),
    ("5 million people", "5,000,000 people"),
    ("a million people", "one million people"),
    ("two hundred and five pages", "205 pages"),
    ("twenty-three apples", "23 apples"),
    ("two million three hundred thousand", "2300000"),
    ("a dozen eggs", "12 eggs"),
    ("the 3rd planet", "the third planet"),
    ("the 21st century", "the twenty first century"),
    ("half a kilo of mince", "500g mince"),
    ("is 9 pm too late", "is 21:00 too late"),
    ("90 seconds of video", "1 minute and 30 seconds of video"),
    ("one and a half hours of sleep", "90 minutes of sleep"),
    ("a token for 15 minutes", "a token for 900 seconds"),
    ("an LED on a 12 V supply", "an LED on a 12V supply"),
    ("signed on 25/03/1957", "signed on March 25, 1957"),
    ("charge past 80%", "charge past 80 percent"),
    ("salmon at 50 °C", "salmon at 122 °F"),
    ("World War II", "World War 2"),
    ("1/4 inch tube", "0.25 inch tube"),
    ("I cannot log in", "I can't log in"),
    ("Is it not safe?", "Isn't it safe?"),
    ("pasta without cheese", "pasta w/o cheese"),
    ("What is the capital of France?", "Tell me the capital of France"),
    ("Can I rotate a video?", "How do I rotate a video?"),
    ("How many days does a cheque take?", "How long does a cheque take, in days?"),
    ("In 2020, who won?", "Who won in 2020?"),
    ("could you please explain what a mutex is?", "explain what is mutex pls"),
    ("lenght of the nile river in kilometers", "Length of the Nile River, in kilometres?"),
    ("Who wrote a payslip?", "who wrote the pay slip"),
    ("colour of the sky", "color of the sky"),
    ("What is AIDS?", "what is aids"),
    ("JSON example of a customer", "json example of a customer"),
    ("How do I fix a flat?", "How to repair a flat?"),
    ("Are GPS trackers in company vans legal?", "Are GPS trackers legal in company vans?"),
    ("Can I take ibuprofen and paracetamol?", "Can I take paracetamol and ibuprofen?"),
    ("how do I fix github.com", "How do I fix github.com?"),
    ("How many r's are in the word 'strawberry'", "How many r's are in strawberry"),
    ("Wie koche ich Reis im Topf", "wie koche ich reis im topf?"),
]


@pytest.mark.parametrize(("a", "b", "guard"), DIFFERENT)
def test_different_questions_are_kept_apart(a: str, b: str, guard: str) -> None:
    assert veto(a, b) == guard
    assert veto(b, a) == guard


@pytest.mark.parametrize(("a", "b"), SAME)
def test_the_same_question_in_other_spelling_passes(a: str, b: str) -> None:
    assert veto(a, b) == ""
    assert veto(b, a) == ""


def test_what_only_looks_like_a_number_stays_as_it_is() -> None:
    assert scan("two three").quantities == ("n:2", "n:3")
    assert scan("twenty three").quantities == ("n:23",)
    assert scan("one thousand, two thousand").quantities == ("n:1000", "n:2000")
    assert scan("Python 3.1.0").quantities == ("literal:3.1.0",)
    assert scan("the two differ; which one? the public half").quantities == ()
    assert scan("no digits - here").quantities == ()
    assert scan("7 - 3").quantities == ("n:7", "op:-", "n:3")


def test_negations_name_what_they_negate() -> None:
    assert negated(read("It isn't that I don't understand")) == ("understand", "understand")
    assert negated(read("a knot in the note")) == ()
    assert negated(read("is it safe or not")) == ()


def test_an_answer_that_speaks_of_what_only_the_old_question_had_is_not_given() -> None:
    old, new = "Who killed Hector in Homer's Iliad?", "Who killed Hector in the Iliad?"
    assert answer_tells(new, old, "In Homer's poem it is Achilles.")
    assert not answer_tells(new, old, "Achilles did.")
    assert answer_tells("Weather on the coast", "Weather on the coast, 5 knots", "With 5 knots it is calm.")
    assert not answer_tells(new, new, "In Homer's poem it is Achilles.")


@pytest.mark.parametrize("text", ["", " ", "???", "1", "\u0000", "ﬁ ½ ²", "-" * 500, "a" * 5000, "一个问题", "😀" * 50])
def test_any_text_can_be_read(text: str) -> None:
    read(text)
    assert veto(text, text) == "" and isinstance(veto(text, "How old is Rome?"), str)


def test_the_same_passage_with_another_task_is_another_question() -> None:
    passage = (
        "The old mill by the river was sold last spring to two sisters who used to bake bread for the market "
        "and now want to open a small hotel there, with a terrace over the water."
    )
    for one, two in (
        ("Which places are named here?", "Rewrite this as a cheerful advertisement, please:"),
        ("Where was the bread sold?", "What goods did the sisters bake earlier?"),
    ):
        assert veto(f"{one} {passage}", f"{two} {passage}") and veto(f"{passage} {one}", f"{passage} {two}")
    assert veto(f"Summarise this: {passage}", f"please summarise this: {passage}") == ""


def test_long_texts_are_the_same_only_letter_by_letter_and_cost_no_time() -> None:
    started = time.thread_time()
    for text in ("“" * 8000, "word " * 5000, "a" * 100_000, '"' * 20_000):
        assert veto(text, text + "!") == "length" and veto(text, text) == ""
    assert time.thread_time() - started < 0.5


# What a review found by trying a thousand pairs; whichever guard says so.
FOUND = [
    ("Is 50 mg of zoloft and 100 mg of trazodone safe?", "Is 100 mg of zoloft and 50 mg of trazodone safe?"),
    ("a cake with 3 eggs and 7 apples", "a cake with 7 eggs and 3 apples"),
    ("I earn 3000 and spend 2000", "I earn 2000 and spend 3000"),
    ("If x = 5 and y = 7, what is x - y?", "If x = 7 and y = 5, what is x - y?"),
    ("mix in a ratio of 1:2", "mix in a ratio of 2:1"),
    ("What is new in Python 3.1?", "What is new in Python 3.10?"),
    ("where is order 1002003004001", "where is order 1002003004002"),
    ("weather for zip code 02134", "weather for zip code 2134"),
    ("chmod 0755", "chmod 755"),
    ("flights from Paris", "flights to Paris"),
    ("transfer money to my savings account", "transfer money from my savings account"),
    ("How do I migrate to PostgreSQL?", "How do I migrate from PostgreSQL?"),
    ("When will you pay me?", "When will I pay you?"),
    ("Do you deliver to me?", "Do I deliver to you?"),
    ("Did I hurt him?", "Did he hurt me?"),
    ("Who is the CEO of Apple?", "Who was the CEO of Apple?"),
    ("Is Taylor Swift married?", "Was Taylor Swift married?"),
    ("Did Russia attack Ukraine?", "Will Russia attack Ukraine?"),
    ("Do I have to pay tax on gifts?", "Can I pay tax on gifts?"),
    ("Must employees work overtime?", "Can employees work overtime?"),
    ("Do I need a passport and a visa?", "Do I need a passport or a visa?"),
    ("Did France and Italy attack Germany?", "Did Germany attack France and Italy?"),
    ("Did the teacher hit the student and leave?", "Did the student hit the teacher and leave?"),
    ("How do I turn on dark mode?", "How do I turn dark mode off?"),
    ("Graph y >= x", "Graph y <= x"),
    ("Solve x+5=10", "Solve x-5=10"),
    ("Factor x^2 - y^2", "Factor x^2 + y^2"),
    ("simplify x/2", "simplify 2/x"),
    ("echo hi > file", "echo hi >> file"),
    ("what does chmod u+x do", "what does chmod u-x do"),
    ("what does ls -lA do", "what does ls -la do"),
    ("what does \\d match", "what does \\D match"),
    ("what does [1:] mean", "what does [:1] mean"),
    ("a motor of 5 mW", "a motor of 5 MW"),
    ("What is hepatitis A?", "What is hepatitis?"),
    ("foods with vitamin A", "foods with vitamin"),
    ("When did World War I start?", "When did World War start?"),
    ("What is a Type I error?", "What is a type error?"),
    ("How does an AND gate work?", "How does an OR gate work?"),
    ("Is bitcoin mining legal in China?", "Is bitcoin legal in China?"),
    ("What is term life insurance?", "What is life insurance?"),
    ("How do I reset my router settings?", "How do I reset my router?"),
    ("How do I open a current account?", "How do I open an account?"),
    ("How do you make bleach?", "How do you use bleach?"),
    ("list git tags", "create git tags"),
    ("What is the best treatment for gout?", "What is the current treatment for gout?"),
    ("How many European countries are there?", "How many EU countries are there?"),
    ("Is gambling legal in my state?", "Is gambling legal in the US?"),
    ("Tylenol dose for a baby", "Tylenol dose for a newborn"),
    ("What does a project manager do?", "What does project management do?"),
    ("What are employer taxes?", "What are employment taxes?"),
    ("routing in AngularJS", "routing in Angular"),
    ("hooks in Preact", "hooks in React"),
    ("install Kubuntu", "install Ubuntu"),
    ("500 mg and 200 mg ibuprofen", "700 mg ibuprofen"),
    ("Is it safe to stop taking aspirin?", "Is it not safe to stop taking aspirin?"),
    ("Where can I smoke in Japan?", "Can I smoke in Japan?"),
    ("What do cats eat?", "Do cats eat?"),
    ("How much vitamin D?", "too much vitamin D"),
    ("is it already open", "is it still open"),
    ("What does 😀 mean?", "What does 😡 mean?"),
]
FOUND_SAME = [
    ("Why doesn't my phone charge?", "Why does my phone not charge?"),
    ("world war ii causes", "World War II causes"),
    ("½ cup of sugar", "1/2 cup of sugar"),
    ("2½ cups", "2.5 cups"),
    ("the 4th of July 1776", "July 4, 1776"),
    ("translate hello to French", "translate hello into French"),
    ("in what year did Rome fall", "when did Rome fall"),
    ("excuse me, how do I cook rice", "how do I cook rice"),
    ("could you tell me in advance how to pay", "tell me how to pay"),
    ("100M users", "100 million users"),
    ("theatre tickets", "theater tickets"),
    ("What is the name of the capital of Peru?", "What is the capital of Peru?"),
    ("What kind of dog is best?", "Which dog is best?"),
]


@pytest.mark.parametrize(("a", "b"), FOUND)
def test_what_decides_is_seen_wherever_it_stands(a: str, b: str) -> None:
    assert veto(a, b) and veto(b, a)


@pytest.mark.parametrize(("a", "b"), FOUND_SAME)
def test_what_decides_nothing_is_overlooked(a: str, b: str) -> None:
    assert veto(a, b) == "" == veto(b, a)


# Where a verifier decides, guards refuse what they are sure of only: other forms of the same get through to it.
FORMS = [
    ("How hot is 200 °C in Fahrenheit?", "How hot are 200 degrees Celsius in °F?"),
    ("What is 30°C in kelvin?", "What are 30 degrees centigrade in kelvin?"),
    ("redirect http -> https", "redirect http → https"),
    ("Is 90 km/h too fast here?", "Is 90 kilometres per hour too fast here?"),
    ("How fast is 55 mph?", "How fast is 55 miles per hour?"),
    ("How much is 3 bar in psi?", "How much is 3 bar in pounds per square inch?"),
    ("Is 50 Mbps enough?", "Are fifty megabits per second enough?"),
    ("How many tsp are in two tbsp?", "How many teaspoons are in 2 tablespoons?"),
    ("How much kcal has an egg?", "How many calories has an egg?"),
    ("What is 75% of 80?", "What is three quarters of 80?"),
    ("Is 20 per cent a lot?", "Is a fifth of it a lot?"),
    ("two thirds of a cup", "2/3 of a cup"),
    ("How long is three quarters of an hour?", "How long is 45 minutes?"),
    ("Does the shop open at half past nine?", "Does the shop open at 9:30?"),
    ("Can I come at a quarter to six in the evening?", "Can I come at 17:45?"),
    ("Are you open at eight in the morning?", "Are you open at 8 am?"),
    ("a nap of an hour and a half", "a nap of 90 minutes"),
    ("a laptop for fifteen hundred dollars", "a laptop for $1,500"),
    ("two and a half thousand people", "2,500 people"),
    ("Add 1200 and 350", "Add 1,200, 350"),
    ("more than 1,400,000,000 people", "more than 1.4 billion people"),
    ("early 401(k) withdrawal", "early 401k withdrawal"),
    ("a k8s pod on 2 nodes", "a Kubernetes pod on two nodes"),
    ("What's the cheapest way to Rome?", "What's the least expensive way to Rome?"),
    ("How do I train without weights?", "How do I train with no weights?"),
    ("What may I do again if I failed the exam?", "What may I do again if I didn't pass the exam?"),
    ("How do I remove super glue?", "How do I remove superglue?"),
    ("Is the garage open overnight?", "Is the garage open through the night?"),
    ("my camera does'nt start", "my camera doesn't start"),
    ("How do I reset my password?", "I don't know how to reset my password"),
    ("How do I reset my password?", "not sure how to reset my password"),
    ("Where do I find my card?", "where do I find my card? I can't figure it out"),
    ("How do I close my account?", "How do I close my account? No rush."),
    ("What is my code?", "What is my code? I can\u2019t find it."),
    ("What is my code?", "what is my code? can't find it anywhere"),
    ("How do I close my account?", "couldn't work it out on my own: how do I close my account?"),
    ("Is there a show tonight?", "Is there a show this evening?"),
    ("Are you open at the weekend?", "Are you open on Saturday and Sunday?"),
    ("Sum it up in two sentences", "Sum it up in 2 sentences"),
    ("Describe Rome in 100 words", "A hundred-word description of Rome"),
    ("Explain it with an example", "Explain it using an example"),
    ("Translate 'good night' into German", "German translation of 'good night'"),
    ("Who is the god of war in Roman and Greek mythology?", "Who is the Greek and Roman god of war?"),
    ("How do I get just the first row?", "How do I get the first row only?"),
    ("Is 90km/h too fast?", "Is 90 kilometers per hour too fast?"),
    ("25Mbps for films", "25 Mbit/s for films"),
    ("a 4x6 inch photo", "a 4 x 6 inch photo"),
    ("an eighth of a pizza", "1/8 of a pizza"),
    ("How are bullets made?", "How is a bullet made?"),
    ("Are you open at 9 tonight?", "Are you open at 9 pm tonight?"),
    ("Explain tides to a ten-year-old", "Explain tides to a child of ten"),
    ("a 25-year-old driver", "a driver aged twenty-five"),
    ("How far is Rome from Paris?", "How far is Paris from Rome?"),
    ("Is soda the same as pop?", "Is pop the same as soda?"),
    ("Is it OK to mix bleach and vinegar?", "Is it OK to mix vinegar and bleach?"),
    ("How do you compute the mean?", "How is the mean computed?"),
    ("Does stress cause headaches?", "Are headaches caused by stress?"),
    ("cancel Acme Cloud subscription", "cancel subscription Acme Cloud"),
]
NOT_FORMS = [
    ("Can I come at half past six?", "Can I come at half past seven?", "numbers"),
    ("Can I come at a quarter to six?", "Can I come at a quarter past six?", "numbers"),
    ("Are you open at eight in the morning?", "Are you open at eight in the evening?", "numbers"),
    ("What is 10 of 50?", "What is 10% of 50?", "numbers"),
    ("two thirds of a cup", "three quarters of a cup", "numbers"),
    ("Ibuprofen for a 3 month old", "Ibuprofen for a 3 year old", "numbers"),
    ("an hour and a half", "two hours and a half", "numbers"),
    ("fifteen hundred dollars", "five hundred dollars", "numbers"),
    ("Is 90 km/h allowed?", "Is 90 mph allowed?", "numbers"),
    ("Is it 20 degrees Celsius?", "Is it 20 degrees Fahrenheit?", "numbers"),
    ("convert utf8 to utf16", "convert utf16 to utf32", "numbers"),
    ("What if I can't find it?", "What if I can find it?", "negation"),
    ("people I don't know", "people I know", "negation"),
    ("I don't know how not to worry", "I don't know how to worry", "negation"),
    ("Why can't I see it?", "couldn't work it out on my own: why can I see it?", "negation"),
    ("Did you find it?", "Did you not find it?", "negation"),
    ("He asks: why not? I don't know", "He asks: why? I don't know", "negation"),
    ("Who is funding the government?", "Who does the government fund?", "order"),
    ("Who is paying the agent?", "Who does the agent pay?", "order"),
    ("Gifts for mom and dad from kids", "Gifts for mom from dad and kids", "order"),
    ("How far is China ahead of Europe?", "How far is Europe ahead of China?", "order"),
    ("Are men in Sweden the same as women in Norway?", "Are women in Sweden the same as men in Norway?", "order"),
    ("Does the warranty cover just the battery?", "Does the warranty cover the battery?", "form"),
    ("I don't know how to swim, can I go?", "I know how to swim, can I go?", "negation"),
    ("I don't work, can I join?", "I work, can I join?", "negation"),
    ("My tooth hurts. It's not urgent. Where do I go?", "My tooth hurts. It's urgent. Where do I go?", "negation"),
    ("It says delivered. I didn't get it. What now?", "It says delivered. I did get it. What now?", "negation"),
    ("I don't know if I'm pregnant, is it safe?", "I'm pregnant, is it safe?", "negation"),
    ("Why did he not accept my offer?", "Why did he refuse my offer?", "antonym"),
    ("Will it rain tonight?", "Will it rain tomorrow evening?", "calendar"),
    ("Are you open tonight?", "Are you open on Saturday evening?", "calendar"),
    ("a 24 month membership", "2 memberships", "numbers"),
    ("Is 100% juice healthy?", "Is 1 juice healthy?", "numbers"),
    ("Which charities are UN registered?", "Which charities are unregistered?", "negation"),
    ("2x5mg melatonin", "2x5g melatonin", "numbers"),
    ("How many oz are in it?", "How many kg are in it?", "units"),
    ("Is my card not working?", "Is my card working?", "negation"),
    ("Can I train with weights?", "Can I train with no weights?", "antonym"),
    ("Did I pass the exam?", "Did I fail the exam?", "antonym"),
    ("How do I hide an app?", "How do I unhide an app?", "antonym"),
    ("the cheapest way to Rome", "the most expensive way to Rome", "antonym"),
    ("Are you open on Saturday?", "Are you open on Sunday?", "calendar"),
    ("Are you open at the weekend?", "Are you open on Friday?", "calendar"),
    ("German translation of 'good night'", "French translation of 'good night'", "form"),
    ("Sum it up in two sentences", "Sum it up in two paragraphs", "form"),
    ("Is Rome bigger than Paris?", "Is Paris bigger than Rome?", "order"),
    ("How do I migrate from A1 to B2?", "How do I migrate from B2 to A1?", "order"),
    ("Did the dog bite the man?", "Did the man bite the dog?", "order"),
    ("Who was influenced by Dylan?", "Who influenced Dylan?", "order"),
    ("Can I take 2 in the afternoon?", "Can I take 2 pm?", "numbers"),
    ("Are you open on May 3 in the afternoon?", "Are you open in May at 3 pm?", "numbers"),
    ("Is the bar open at 2 at night?", "Is the bar open at 2 pm?", "numbers"),
    ("Does it get to -5 at night?", "Does it get to 5 at night?", "numbers"),
    ("What does Article 6(1) say?", "What does Article 61 say?", "numbers"),
    ("What is 2(3)?", "What is 23?", "numbers"),
    ("Convert 100 euros to yen", "Convert 100 dollars to yen", "numbers"),
    ("Can I take 5 ml of syrup?", "Can I take 5 mg of syrup?", "numbers"),
    ("Can one live 3 years without food?", "Can one live 3 seconds without food?", "numbers"),
    ("Who won the cup in 2018?", "Who won the cup?", "numbers"),
    ("Is it safe to take 8 aspirin?", "Is it safe to take aspirin?", "numbers"),
    ("a quarter to ten", "9:45", "numbers"),  # of what?
    ("Why can't I upload files?", "Why can't I download files?", "antonym"),
    ("Why does my door not open?", "Why does my door not close?", "antonym"),
    ("As far as I know, did the dog bite the man?", "As far as I know, did the man bite the dog?", "order"),
    ("Convert the same file from PDF to Word", "Convert the same file from Word to PDF", "order"),
    ("Do people eat sharks?", "Are sharks eating people?", "order"),
    ("Is it known if Germany attacked Russia?", "Do you know if Russia attacked Germany?", "order"),
    ("Did Rome attack Carthage?", "Was Rome attacked by Carthage?", "order"),
    ("What happens with invalid JSON?", "What happens with valid JSON?", "negation"),
    ("What are independent variables?", "What are in dependent variables?", "negation"),
    ("What if the surgery is not urgent?", "What if the surgery is urgent?", "negation"),
    (
        "Should I drive if I cannot tell which lights are red?",
        "Should I drive if I can tell which lights are red?",
        "negation",
    ),
    ("Which animals do not see it?", "Which animals see it?", "negation"),
    ("Is there no rush hour on Sunday?", "Is there rush hour on Sunday?", "negation"),
    ("Why is the folder not deleted?", "Why is the empty folder deleted?", "negation"),
    ("Explain gravity in one short sentence", "Explain gravity", "form"),
    ("Show the plans in a comparison table", "Show the plans", "form"),
    ("Give me just the summary of Hamlet", "Give me the summary of Hamlet", "form"),
    ("Tell me in Spanish some history facts", "Tell me some history facts", "form"),
]


def test_what_looks_like_a_time_or_a_fraction_and_is_none_stays() -> None:
    for text in (
        "fell by a quarter to 10",
        "cut in half to 3 parts",
        "half past 30",
        "take two at night",
        "at 12 in the morning",
        "December 24 in the morning",
        "3.30 in the afternoon",
        "a month and a half marathon",
    ):
        assert in_digits(text) == text
    assert in_digits("at a quarter to one at night") == "at 12:45 am"
    assert in_digits("at five in the evening, from half past six this morning") == "at 5 pm, from 6:30 am"
    assert scan("at a quarter to one at night").quantities == ("clock:00:45",)
    assert read("Are you open at f\u0131ve in the morning?").quantities == (), "a dotless i is no letter of five"
    assert scan("1h30min, 6ft2in").quantities == ("length:1.8796", "time:5400")
    assert scan("utf8mb4 and COVID19 days").quantities == ("n:19", "n:4", "n:8")
    assert scan("a fourth of July party, a fourth of it").quantities == ("date:7-4", "n:0.25")
    assert scan("one third-party app, one fifth grader").quantities == ("n:3", "n:5")
    assert answer_tells("Is it too fast?", "Is 90 km/h too fast?", "Yes, 90 km/h is.")
    assert scan("the last three quarters of revenue").quantities == ("months:9",)
    assert scan("ten hundred-dollar bills").quantities != scan("1000 dollars").quantities


@pytest.mark.parametrize(("a", "b"), FORMS)
def test_another_form_of_the_same_gets_through_to_the_verifier(a: str, b: str) -> None:
    assert veto(a, b, hard(1.0)) == "" == veto(b, a, hard(1.0))


@pytest.mark.parametrize(("a", "b", "guard"), NOT_FORMS)
def test_what_only_looks_like_another_form_does_not(a: str, b: str, guard: str) -> None:
    assert veto(a, b, hard(1.0)) == guard == veto(b, a, hard(1.0))
