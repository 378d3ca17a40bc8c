"""Sixteen texts that a person might type, two for each domain of the text demo.

They were written, and committed, before the demo was run on any of them, and are not to be changed to please it. The demo's settings were
chosen on `development`'s texts. One of them, that of the court, is prescribed and had been run on earlier settings.
"""

QUERIES: tuple[tuple[str, str], ...] = (
    ("medicine", "Treatment with the antibiotic for ten days reduced fever and pain in most of the infants."),
    ("medicine", "We report a case of a rare tumour of the liver in a young woman."),
    ("film-reviews", "The first half is slow, but the last twenty minutes of this thriller are really exciting."),
    ("film-reviews", "I had high hopes for the sequel, but it is boring and badly acted."),
    ("code-sympy", "f = Function('f')\neq = f(x).diff(x) - f(x)\nprint(dsolve(eq, f(x)))\n"),
    (
        "code-sympy",
        "def test_factor():\n    x, y = symbols('x,y')\n    assert factor(x**2 - y**2) == (x - y)*(x + y)\n",
    ),
    ("speeches", "The peace and prosperity of our country depend on the wisdom of the laws you will pass."),
    ("speeches", "My fellow Americans, we will defeat terrorism and bring our troops home with honor."),
    ("books", "Prince Andrew looked at the sky, and it seemed to him that he was dying."),
    ("books", "He lit a cigarette, sat down by the fire, and asked me to tell him everything."),
    ("code-django", "class PostListView(ListView):\n    model = Post\n    template_name = 'posts/list.html'\n"),
    ("code-django", "parser.add_argument('--database', default='default', help='Which database to use.')\n"),
    ("law", "The court held that the defendant was liable."),
    ("law", "This contract may be terminated by either party upon thirty days written notice to the other."),
    ("scripture", "The priest shall sprinkle the blood before the tabernacle seven times, and burn the fat."),
    ("scripture", "Let not your heart be troubled, for the Lord is nigh unto them that fear him."),
)
