package locksql

import (
	"strings"
	"sync"
	"unsafe"
)

// The way of a text: mentioned? remembered? plain? and if not, what is in it.

// Recognizer finds lock calls. It is safe for concurrent use.
type Recognizer struct {
	functions []function
	needles   []needle // one for each function
	cache     cache
}

// function is a user's function that takes or releases locks.
type function struct{ schema, name string }

// New returns a Recognizer that also knows the given functions, by bare or schema-qualified names, which fold like
// identifiers unless quoted: lock_order, app.lock_order, "LockOrder". What they do cannot be known, so a call of one is
// Opaque and Session. A name without a schema is that function in any schema; a name with one is also found where the
// text has no schema, since search_path may lead there.
func New(functions []string) *Recognizer {
	r := &Recognizer{}
	for _, f := range functions {
		p := parser{lexer: lexer{src: f}}
		p.advance()
		schema, name, _, _ := p.acceptName()
		if name == "" {
			continue
		}
		r.functions = append(r.functions, function{schema, name})
		r.needles = append(r.needles, newNeedle(name))
	}
	return r
}

// Mentions reports whether the text contains "advisory" or the name of a configured function (without its schema), in
// any ASCII case. A text that does not calls no lock function. It allocates nothing and reads the text once, and once
// more for each configured function.
func (r *Recognizer) Mentions(text string) bool {
	if advisory.in(text) {
		return true
	}
	for i := range r.needles {
		if r.needles[i].in(text) {
			return true
		}
	}
	return false
}

// nothing is the analysis of a text that does nothing this package looks for.
var nothing = &Statement{}

// Parse analyses a text as the server will read it under that setting of standard_conforming_strings. The result is
// never nil, and is shared. A text that does not mention a function is analysed for Steps only.
func (r *Recognizer) Parse(text string, standardConformingStrings bool) *Statement {
	if !r.Mentions(text) {
		return r.steps(text, standardConformingStrings)
	}
	if len(text) > maxCached {
		return r.parse(text, standardConformingStrings)
	}
	key := cacheKey{text, standardConformingStrings}
	if st := r.cache.get(key); st != nil {
		return st
	}
	key.text = strings.Clone(text) // it may be a part of something large
	st := r.parse(key.text, standardConformingStrings)
	r.cache.put(key, st)
	return st
}

func (r *Recognizer) parse(text string, standardConformingStrings bool) *Statement {
	p := parser{lexer: lexer{src: text, escapes: !standardConformingStrings}}
	p.advance()
	ahead := p
	if calls, ok := ahead.plain(); ok {
		st := &Statement{Form: Plain, Calls: calls}
		for i := range calls {
			st.Session = st.Session || calls[i].Func.Session()
		}
		return st
	}
	w := walker{parser: p, r: r, st: &Statement{}, calls: true}
	w.statements()
	return w.st
}

// steps analyses a text that mentions no function. It runs for every statement while a connection holds something, so
// a single statement is told by its first words.
func (r *Recognizer) steps(text string, standardConformingStrings bool) *Statement {
	l := lexer{src: text, escapes: !standardConformingStrings}
	first := l.next()
	if single := strings.IndexByte(strings.TrimRight(text, "; \t\r\n"), ';') < 0; single && !beginsStep(l.word(first)) {
		return nothing
	}
	w := walker{parser: parser{lexer: l, tok: first}, r: r, st: &Statement{}}
	w.statements()
	return w.st
}

// configured reports whether a name in the text may be one of the configured functions.
func (r *Recognizer) configured(schema, name string) bool {
	for _, f := range r.functions {
		if f.name == name && (f.schema == "" || schema == "" || f.schema == schema) {
			return true
		}
	}
	return false
}

// Texts up to maxCached bytes are remembered; the cache holds about maxCache bytes.
const (
	maxCached = 8 << 10
	maxCache  = 1 << 20
)

// cache remembers analyses in two generations: when the young one is full it becomes the old one, and the old one,
// with what was not asked for since, is dropped. So no entry needs a place in a list.
type cache struct {
	mu         sync.Mutex // guards all below
	young, old map[cacheKey]*Statement
	size       int // bytes in young
}

type cacheKey struct {
	text                      string
	standardConformingStrings bool
}

func (c *cache) get(key cacheKey) *Statement {
	c.mu.Lock()
	defer c.mu.Unlock()
	st := c.young[key]
	if st == nil {
		if st = c.old[key]; st != nil {
			c.add(key, st)
		}
	}
	return st
}

func (c *cache) put(key cacheKey, st *Statement) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.add(key, st)
}

// add is called with mu held.
func (c *cache) add(key cacheKey, st *Statement) {
	size := footprint(key, st)
	if c.young == nil || c.size+size > maxCache/2 {
		c.young, c.old, c.size = make(map[cacheKey]*Statement), c.young, 0
	}
	c.young[key] = st
	c.size += size
}

// footprint is about how many bytes an entry holds.
func footprint(key cacheKey, st *Statement) int {
	n := 64 + int(unsafe.Sizeof(key)) + len(key.text) + int(unsafe.Sizeof(*st)) + cap(st.Steps)*int(unsafe.Sizeof(Step{}))
	n += cap(st.Calls) * int(unsafe.Sizeof(Call{}))
	for _, c := range st.Calls {
		n += cap(c.Args) * int(unsafe.Sizeof(Arg{}))
		for _, a := range c.Args {
			n += len(a.Expr) + len(a.value.text) + cap(a.pieces)*int(unsafe.Sizeof(piece{}))
			for _, p := range a.pieces {
				n += len(p.text)
			}
		}
	}
	return n
}
