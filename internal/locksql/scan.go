package locksql

// The scan for calls: one pass over the tokens of a statement, with a stack of parentheses. It knows as much of SQL's
// grammar as it takes to tell where a statement ends, which names are calls, and over which rows they are evaluated.

// scan reads to the end of a statement, or of the whole text of code in a string, and finds the calls in it.
type scan struct {
	*walker
	found found

	level         // the innermost parenthesis
	outer []level // the ones around it
	opens int     // the call whose parenthesis comes next, as level.call

	words  [3]string // the last three tokens, "" where one is no keyword
	before string    // the token before the current name
	parts  int       // of the current name: 2 in a.b
	schema token     // the part before the last
	start  int       // of the current name
	dotted bool      // the last token is the dot in a name

	execute  bool   // AS EXECUTE is in it
	executes string // the prepared statement's name

	routine, atomic, first bool // CREATE FUNCTION; in its BEGIN ATOMIC; at the beginning of a statement there

	dynamic   bool  // code: has EXECUTE
	inStrings found // code: what its strings may do when it has
}

// level is a pair of parentheses, or the whole statement. A level with SELECT in it is a query, or several, one after
// the other: UNION.
type level struct {
	call   int // 1 + index of the call whose arguments these are
	args   int // where the first argument begins
	commas int
	comma  int // the last

	clause clause
	item   bool // a FROM item comes next
	isItem bool // this parenthesis is one
	values bool // VALUES is in it

	// Of the current query:
	rows    bool // it has the rows of a table
	made    bool // it has rows that the statement makes: unnest($1), VALUES
	drops   bool // it may return less than it evaluates; of a UNION too
	locks   bool // a lock function is evaluated in it
	columns bool // with an argument that is no constant, so it may depend on the query around

	allRows, allMade, allColumns bool // of the queries before it, too
}

type clause uint8

const (
	noQuery clause = iota
	inList
	inFrom
	afterFrom
)

func (s *scan) run() {
	for s.tok.kind != tEOF && s.tok.kind != tUnterminated {
		first := false
		if s.tok.kind == ';' && len(s.outer) == 0 {
			if s.depth == 0 && !s.atomic {
				break
			}
			s.endQuery()
			s.clause, s.drops, first = noQuery, false, true
		}
		t := s.advance()
		w := s.word(t)
		switch t.kind {
		case tIdent, tQuoted:
			if !s.dotted {
				s.parts, s.start, s.before = 0, t.start, s.words[2]
			}
			s.parts++
			if s.tok.kind == '.' {
				s.schema = t
				break
			}
			if s.parts > 1 {
				w = ""
			}
			first = s.visit(t, w)
		case '(':
			s.push(t)
		case ')':
			s.pop(t)
		case ',':
			s.commas++
			s.comma = t.start
			s.item = s.clause == inFrom
		case tString:
			if s.depth > 0 {
				s.literal(t)
			}
		}
		s.dotted = t.kind == '.' && s.parts > 0
		if !s.dotted && t.kind != tIdent && t.kind != tQuoted {
			s.parts = 0
		}
		s.words = [3]string{s.words[1], s.words[2], w}
		s.first = first
	}
	for len(s.outer) > 0 {
		s.pop(s.tok)
	}
	s.endQuery()
}

// visit takes in a name or keyword that is complete. It returns true where a statement of a routine's body begins.
func (s *scan) visit(t token, w string) bool {
	if s.tok.kind == '(' && s.calls && s.function(t) {
		s.item = false
		return false
	}
	if s.item {
		s.fromItem(t, w)
	}
	switch w {
	case "select", "perform", "values":
		s.endQuery()
		s.drops = s.drops && w != "perform" // which begins a statement in code, and wants no row back
		s.clause, s.item, s.values = inList, false, w == "values"
	case "update", "delete", "merge":
		if s.clause == noQuery {
			s.clause, s.rows = afterFrom, true
		}
	case "from":
		if s.clause == inList && s.words[2] != "distinct" {
			s.clause, s.item = inFrom, true
		}
	case "join":
		s.item = s.clause == inFrom
		s.drops = s.drops || s.words[2] != "cross"
	case "group", "window", "order", "for", "returning": // what has commas of its own after FROM
		switch s.clause {
		case inFrom:
			s.clause = afterFrom
		case noQuery: // FOR and the query of a cursor or a loop, which may be left early
			s.drops = true
		}
		s.drops = s.drops || w == "group"
	case "where", "having", "distinct", "limit", "offset", "fetch", "union", "intersect", "except", "into":
		s.drops = true
	case "execute":
		s.dynamic = true
		if s.words[2] == "as" && s.clause == noQuery && len(s.outer) == 0 {
			s.execute = true
			if s.named() {
				s.executes = s.name(s.tok)
			}
		}
	case "atomic":
		if s.routine && len(s.outer) == 0 && s.words[2] == "begin" {
			s.atomic = true
			return true
		}
	case "end":
		// A statement cannot begin with END there, so this is the end of the body; that of a CASE comes later in one.
		if s.first {
			s.atomic = false
		}
	}
	return false
}

// fromItem takes in a word where a FROM item is expected.
func (s *scan) fromItem(t token, w string) {
	switch {
	case w == "lateral", w == "only", w == "rows", w == "from": // LATERAL f(), ONLY (t), ROWS FROM (f())
		return
	case s.tok.kind == '(':
		s.made = s.made || manyRows(s.name(t))
	case w != "select" && w != "with":
		s.rows = true
	}
	s.item = false
}

// manyRows reports whether a function is one of those that make a table of what they are given; of others in FROM it
// is not known, and they are taken for one row.
func manyRows(name string) bool {
	switch name {
	case "unnest", "generate_series", "generate_subscripts", "string_to_table", "regexp_split_to_table", "regexp_matches",
		"json_array_elements", "json_array_elements_text", "jsonb_array_elements", "jsonb_array_elements_text",
		"json_each", "json_each_text", "jsonb_each", "jsonb_each_text", "json_to_recordset", "jsonb_to_recordset":
		return true
	}
	return false
}

// function takes in a name before a parenthesis; false: it is none of the functions looked for, or not called.
func (s *scan) function(t token) bool {
	switch s.before {
	case "as", "into", "table", "exists", "with", "recursive", "references", "copy":
		return false // a name with a column list
	case "call":
		s.found.add(found{locks: true, session: true})
	}
	name, schema := s.name(t), ""
	if s.parts > 1 {
		schema = s.name(s.schema)
	}
	f, ok := familyFunc(name)
	if ok && (s.parts == 1 || s.parts == 2 && schema == "pg_catalog") {
		s.call(f)
		return true
	}
	if ok || s.r.configured(schema, name) {
		s.found.add(found{locks: true, session: true})
		s.columns = true
		return true
	}
	return false
}

// call takes in a call of the family; its parenthesis comes next.
func (s *scan) call(f Func) {
	s.found.add(found{locks: true, session: f.Session()})
	ahead := s.parser
	ahead.advance()
	args, constant := ahead.plainArgs(f)
	switch {
	case !constant:
		s.columns = true
	case !s.item: // FROM pg_try_advisory_lock(1) is evaluated once
		s.locks = true
	}
	if len(s.st.Calls) == maxCalls {
		return
	}
	c := Call{Func: f, Args: args, Start: s.base + s.start}
	if s.whole != nil {
		c.Start, c.End = s.whole.start, s.whole.end
	}
	s.st.Calls = append(s.st.Calls, c)
	s.opens = len(s.st.Calls)
}

// literal takes in a string in code.
func (s *scan) literal(t token) {
	s.found.add(s.code(t, true))
	text, _ := s.unquote(t)
	s.inStrings.add(s.raw(text))
}

func (s *scan) push(t token) {
	child := level{call: s.opens, args: t.end, isItem: s.item}
	s.opens = 0
	if s.item {
		s.item = false
		child.clause, child.item = inFrom, true // perhaps a join; SELECT changes it
	}
	s.outer = append(s.outer, s.level)
	s.level = child
}

// pop closes the innermost parenthesis, at t.
func (s *scan) pop(t token) {
	if len(s.outer) == 0 {
		return // a syntax error
	}
	// A query whose arguments are constants is evaluated once.
	locks := s.locks && s.clause == noQuery
	s.endQuery()
	child := s.level
	s.level = s.outer[len(s.outer)-1]
	s.outer = s.outer[:len(s.outer)-1]
	if child.call > 0 {
		s.closeCall(&s.st.Calls[child.call-1], child, t)
	}
	s.locks = s.locks || locks
	s.columns = s.columns || child.allColumns
	s.drops = s.drops || locks || child.allColumns // perhaps an aggregate's argument
	s.rows = s.rows || child.isItem && child.allRows
	s.made = s.made || child.isItem && (child.allMade || child.values && child.commas > 0)
}

// closeCall fills in what is known at the end of a call.
func (s *scan) closeCall(c *Call, l level, t token) {
	if s.whole == nil {
		c.End = s.base + t.end
	}
	if c.Args == nil && t.start > l.args && l.commas < 2 {
		if l.commas == 1 {
			c.Args = append(c.Args, s.render(l.args, l.comma, value{}))
			l.args = l.comma + 1
		}
		c.Args = append(c.Args, s.render(l.args, t.start, value{}))
	}
	if l.commas > 0 {
		c.Space = Pair
	}
}

// endQuery closes the query of the level; another may follow it.
func (s *scan) endQuery() {
	l := &s.level
	// Rows that the program made are the ones it wants locked, unless it does not get them all: from a query around this
	// one neither.
	if (l.rows || l.made && (l.drops || len(s.outer) > 0)) && (l.locks || l.columns) {
		s.found.perRow = true
	}
	l.allRows = l.allRows || l.rows
	l.allMade = l.allMade || l.made
	l.allColumns = l.allColumns || l.columns
	l.rows, l.made, l.locks, l.columns = false, false, false, false
}
