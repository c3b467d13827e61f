package locksql

import "strings"

// The walk over texts that are not of the plain form: every statement in them is taken for executed unless its first
// words say that it only defines, prepares or explains. Calls are names of the family before a parenthesis; what is in
// the parentheses is looked at for reports only.

// walker reads the statements of one text into st, or a string of it that may be run as code.
type walker struct {
	parser
	r     *Recognizer
	st    *Statement
	calls bool // look for calls; false: the text mentions none, only steps are of interest

	// For a string in the text:
	depth int    // how deep in strings in strings
	base  int    // where src begins in the text
	whole *token // the literal in the text, when src is not in it byte for byte
}

const (
	maxCalls = 100 // the calls kept for reports
	maxCode  = 4   // how deep code in strings in strings is read; below, every mention is taken for a call
)

// found is what a stretch of text does when it is executed.
type found struct {
	locks, session, perRow bool
}

func (f *found) add(g found) {
	f.locks = f.locks || g.locks
	f.session = f.session || g.session
	f.perRow = f.perRow || g.perRow
}

// mode is what the server does with a statement.
type mode uint8

const (
	executed mode = iota
	defined       // kept for later, or parsed only
	prepared      // kept for EXECUTE
	deferred      // opened as a cursor
)

func (w *walker) statements() {
	for w.tok.kind != tEOF && w.tok.kind != tUnterminated {
		if !w.accept(';') {
			w.statement()
		}
	}
	if w.tok.kind == tUnterminated {
		w.opaque(w.raw(w.src))
	}
}

// opaque notes what an executed part of the text does.
func (w *walker) opaque(f found) {
	if f.locks {
		w.st.Form = Opaque
		w.st.Session = w.st.Session || f.session
		w.st.PerRow = w.st.PerRow || f.perRow
	}
}

func (w *walker) statement() {
	mode, routine := w.begin()
	kept := len(w.st.Calls)
	s := scan{walker: w, routine: routine}
	s.run()
	switch {
	case s.execute:
		// EXPLAIN and WITH NO DATA evaluate the arguments of EXECUTE too.
		if mode != defined {
			w.st.Steps = append(w.st.Steps, Step{Kind: StepExecute, Name: s.executes})
		}
		mode = executed
	case s.words == [3]string{"with", "no", "data"}: // CREATE TABLE AS, CREATE MATERIALIZED VIEW
		mode = defined
	}
	switch mode {
	case defined:
		w.st.Calls = w.st.Calls[:kept]
	case prepared:
		w.st.Calls = w.st.Calls[:kept]
		step := &w.st.Steps[len(w.st.Steps)-1]
		step.Locks, step.Session = s.found.locks, s.found.session
	default:
		w.opaque(s.found)
		w.st.Deferred = w.st.Deferred || mode == deferred && s.found.locks
	}
}

// begin reads the words that tell what the server does with the statement. routine: semicolons may be inside it.
func (w *walker) begin() (m mode, routine bool) {
	switch k := w.word(w.tok); k {
	case "explain":
		m = w.explain()
		if w.word(w.tok) == "execute" {
			if m == executed {
				w.step()
			}
			m = executed // of the arguments
		}
		return m, false
	case "create":
		return w.create()
	case "alter":
		w.advance()
		switch w.word(w.tok) {
		case "aggregate", "default", "event", "extension", "function", "operator", "policy", "procedure", "routine", "rule", "trigger", "view":
			return defined, false
		}
		return executed, false
	case "drop", "comment", "grant", "revoke", "security":
		return defined, false
	case "declare":
		return deferred, false
	case "do":
		w.opaque(w.do())
		return executed, false
	}
	return w.step(), false
}

// create reads CREATE and the words before the kind of object.
func (w *walker) create() (m mode, routine bool) {
	for {
		w.advance()
		switch w.word(w.tok) {
		case "function", "procedure":
			return defined, true
		case "aggregate", "cast", "conversion", "event", "language", "operator", "policy", "rule", "transform", "trigger", "view":
			return defined, false
		case "or", "replace", "temp", "temporary", "local", "global", "unlogged", "recursive", "constraint", "trusted", "procedural":
		default:
			return executed, false
		}
	}
}

// explain reads EXPLAIN and its options.
func (w *walker) explain() mode {
	w.advance()
	m := defined
	if w.tok.kind != '(' {
		if w.acceptWord("analyze") {
			m = executed
		}
		w.acceptWord("verbose")
		return m
	}
	w.advance() // options, or a query in parentheses, which has none called analyze
	for more := true; more; more = w.accept(',') {
		// Quoted, too: the grammar takes any name for an option.
		analyze := w.named() && (w.name(w.tok) == "analyze" || w.word(w.tok) == "analyze")
		on := true
		for w.tok.kind != ',' && w.tok.kind != ')' && w.tok.kind != ';' && w.tok.kind != tEOF && w.tok.kind != tUnterminated {
			on = w.on(w.advance()) // the last decides: of a sign and a number the number, of a name alone the name
		}
		switch {
		case analyze && on:
			m = executed
		case analyze:
			m = defined
		}
	}
	w.accept(')')
	return m
}

// on reads the value of an option; only these switch one off (defGetBoolean).
func (l *lexer) on(t token) bool {
	s := ""
	switch t.kind {
	case tNumber:
		n, _ := parseInteger(l.text(t)) // others are refused
		return n.mag != 0
	case tString:
		s, _ = l.unquote(t)
	case tIdent, tQuoted:
		s = l.name(t)
	}
	return !equalFold(s, "off") && !equalFold(s, "false")
}

// do reads DO [LANGUAGE name] 'code' [LANGUAGE name].
func (w *walker) do() (f found) {
	code, language, afterLanguage := token{}, "plpgsql", false
	for w.advance(); w.named() || w.tok.kind == tString; w.advance() {
		switch {
		case w.named():
			language = w.name(w.tok)
		case afterLanguage:
			language, _ = w.unquote(w.tok)
		default:
			code = w.tok
		}
		afterLanguage = w.word(w.tok) == "language"
	}
	if code.kind == tString && w.calls {
		f = w.code(code, language == "plpgsql")
	}
	return f
}

// code reads a string that the server runs as code; dynamic code is not readable before it is put together.
func (w *walker) code(t token, readable bool) found {
	text, ok := w.unquote(t)
	switch {
	case !ok:
		return w.raw(w.text(t))
	case !readable, w.depth == maxCode:
		return w.raw(text)
	}
	sub := walker{parser: parser{lexer: lexer{src: text, escapes: w.escapes}}, r: w.r, st: w.st, calls: true, depth: w.depth + 1, whole: w.whole}
	if i := strings.Index(w.text(t), text); i >= 0 {
		sub.base = w.base + t.start + i
	} else if sub.whole == nil {
		sub.whole = &token{start: w.base + t.start, end: w.base + t.end}
	}
	sub.advance()
	s := scan{walker: &sub}
	s.run()
	if s.dynamic {
		s.found.add(s.inStrings)
	}
	if sub.tok.kind == tUnterminated {
		s.found.add(sub.raw(text))
	}
	return s.found
}

// raw judges text that is not read as SQL by the words in it: a word with "advisory" in it is a lock, and a session
// lock unless it is the name of a transaction-level function.
func (w *walker) raw(text string) (f found) {
	for i := 0; i < len(text); i++ {
		start := i
		for i < len(text) && isIdent(text[i]) {
			i++
		}
		if word := text[start:i]; advisory.in(word) {
			fn, ok := familyFunc(lower(word))
			f.add(found{locks: true, session: !ok || fn.Session()})
		}
	}
	for i := range w.r.needles {
		if w.r.needles[i].in(text) {
			return found{locks: true, session: true}
		}
	}
	return f
}
