"""Sixteen texts that a person might type, two for each domain of the text demo.

They were written before the demo was run on any of them, and are not to be changed to please it.
"""

QUERIES: tuple[tuple[str, str], ...] = (
    ("medicine", "Patients were randomly assigned to receive either the drug or a placebo for twelve weeks."),
    (
        "medicine",
        "Serum levels of the protein were significantly higher in rats with induced diabetes than in controls.",
    ),
    ("film-reviews", "This movie was a complete waste of time: the acting is terrible and the plot makes no sense."),
    ("film-reviews", "I loved the film. The director gets wonderful performances from the whole cast."),
    ("code-sympy", "def simplify(expr):\n    x, y = symbols('x y')\n    return expr.subs(x, y).expand()\n"),
    ("code-sympy", "assert integrate(sin(x)*cos(x), x) == sin(x)**2/2\n"),
    ("speeches", "Fellow citizens, the state of our union is strong, and I ask the Congress to act this year."),
    ("speeches", "The Treasury reports that the revenues of the Government exceeded its expenditures last year."),
    ("books", '"My dear Watson," said Holmes, lighting his pipe, "the case is simpler than it appears."'),
    ("books", "The prince rode slowly past the regiment, and the old general saluted him in silence."),
    ("code-django", "class Article(models.Model):\n    title = models.CharField(max_length=200)\n"),
    ("code-django", "def get_queryset(self):\n    return super().get_queryset().filter(published=True)\n"),
    ("law", "The court held that the defendant was liable."),
    ("law", "The licensee shall not sublicense the software without the prior written consent of the licensor."),
    ("scripture", "And the LORD spake unto Moses, saying, Go thou unto the children of Israel."),
    ("scripture", "Blessed are they that walk in the way of the righteous, for theirs is the mercy of God."),
)
