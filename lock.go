package pgadvlock

// This file owns the words that reports are made of: which lock, how it is
// held, by which session, and which line of the program asked for it.

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock/internal/ledger"
	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// Key is an advisory lock's key: one bigint, or two ints, which are separate
// key spaces in PostgreSQL (manual, 9.28.10 Advisory Lock Functions).
//
// A key that the program computes in SQL, as in pg_advisory_lock(hashtext($1)),
// is known to the driver only as that expression; neither Bigint nor Ints
// answers then. Keys are comparable.
type Key struct {
	space  locksql.Space
	number bool
	bigint int64
	ints   [2]int32
	text   string
}

func publicKey(k locksql.Key) Key {
	// locksql.Key.Identity stays behind: it holds argument values.
	return Key{
		space:  k.Space,
		number: k.Kind == locksql.KeyNumber,
		bigint: k.Bigint,
		ints:   k.Pair,
		text:   k.String(),
	}
}

// String returns "42" for a bigint key, "(1, 9527)" for two ints, and the
// expression, such as "hashtext($1)" with string literals as '…', when only
// that is known; "1234 = hashtext($1)" when the server told the number. The zero
// Key is "".
func (k Key) String() string { return k.text }

// Bigint returns the key of the bigint space; ok is false when the key is a
// pair or not known as a number.
func (k Key) Bigint() (key int64, ok bool) {
	return k.bigint, k.number && k.space == locksql.Bigint
}

// Ints returns the key of the (int, int) space; ok is false when the key is a
// bigint or not known as numbers.
func (k Key) Ints() (key1, key2 int32, ok bool) {
	return k.ints[0], k.ints[1], k.number && k.space == locksql.Pair
}

// LockMode is how a lock excludes others, in the words of the manual's
// advisory lock functions. The zero value is ExclusiveLock.
type LockMode uint8

const (
	ExclusiveLock LockMode = iota // pg_advisory_lock: excludes both modes
	ShareLock                     // pg_advisory_lock_shared: excludes ExclusiveLock only
)

// String returns "exclusive" or "share".
func (m LockMode) String() string {
	if m == ShareLock {
		return "share"
	}
	return "exclusive"
}

// Scope is what a lock's life is bound to. The zero value is ScopeSession.
type Scope uint8

const (
	ScopeSession     Scope = iota // until unlocked, or the session ends; survives COMMIT and ROLLBACK
	ScopeTransaction              // until the transaction ends; there is no unlock
)

// String returns "session" or "transaction".
func (s Scope) String() string {
	if s == ScopeTransaction {
		return "transaction"
	}
	return "session"
}

// Lock is an advisory lock that a connection holds, waits for, or asked for.
type Lock struct {
	Key    Key
	Mode   LockMode
	Scope  Scope
	Count  int       // how often it is held; as many unlocks free it. 0: not held, or held in a number that only the server knows
	Since  time.Time // when the driver learned of the first acquire, or began to wait; zero: not known
	Caller Caller    // who asked for it; zero: not known
}

// Session is what one connection holds and waits for at one moment.
type Session struct {
	// BackendPID is the server process, as in pg_stat_activity. 0 when the
	// driver underneath does not say; before the road was examined (see
	// [PoolMode]) it is what the server's greeting said, which behind a
	// pooler is not the backend.
	BackendPID uint32
	PoolMode   PoolMode
	// Exact says that the session locks in Held are all that there are. When
	// false, a statement ran whose locks could not be counted, or the raw
	// connection was lent out. Transaction locks are an upper bound.
	Exact   bool
	Held    []Lock // oldest first, session locks before transaction locks
	Waiting []Lock // sent, not answered yet
}

// Caller is a place in the program's source: the innermost frame that belongs
// to package main or the program's main module, or else the innermost one
// outside database/sql and this module. It names the program's own line even
// when sqlx, GORM or the like stand in between.
type Caller struct {
	Function string // as runtime.Frame has it: "example.com/app/jobs.(*Cron).Run"
	File     string
	Line     int
}

// String returns "file:line (function)", or "unknown" for the zero Caller.
func (c Caller) String() string {
	if c == (Caller{}) {
		return "unknown"
	}
	return fmt.Sprintf("%s:%d (%s)", c.File, c.Line, c.Function)
}

// origin is what the ledger remembers of an acquire.
type origin struct {
	since  time.Time
	caller Caller
	err    error      // how the attempt ended, when that left a doubt
	hold   trace.Span // from the grant to the release; nil when nobody records it
}

func publicLock(l ledger.Lock[origin]) Lock {
	return Lock{Key: publicKey(l.Key), Mode: modeOf(l.Share), Scope: scopeOf(l.Xact), Count: l.Count, Since: l.Origin.since, Caller: l.Origin.caller}
}

func modeOf(share bool) LockMode {
	if share {
		return ShareLock
	}
	return ExclusiveLock
}

func scopeOf(xact bool) Scope {
	if xact {
		return ScopeTransaction
	}
	return ScopeSession
}

func attemptedLock(at ledger.Attempt[origin]) Lock {
	return publicLock(ledger.Lock[origin]{Key: at.Key, Share: at.Func.Share(), Xact: !at.Func.Session(), Origin: at.Origin})
}

const (
	thisPackage  = "github.com/pgadvlock/pgadvlock"
	callerFrames = 64  // deeper than any ORM seen between them
	sitesMax     = 512 // some 300 KB
)

// mainModule is the path of the program's main module, "" when the binary does
// not say.
var mainModule = sync.OnceValue(func() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		return info.Main.Path
	}
	return ""
})

// site is where a statement comes from.
type site struct {
	caller Caller
	pooled bool // sent through a method of *sql.DB, which takes whichever connection is free
	far    bool // the nearest frames do not tell
}

type stack [callerFrames]uintptr

// callSites finds the places in the program that send statements. It remembers
// what a stack says, because to look its symbols up takes longer than to walk
// it. Its memory is bounded: when it is full, it forgets everything and starts
// again.
type callSites struct {
	mu    sync.RWMutex // guards sites
	sites map[stack]site
}

// asks reports whether somebody may want to know later where a plain lock
// statement came from: nobody remembers a release, and one that comes through
// *sql.DB is the first for which its connection was handed out.
func (c *Conn) asks(st *locksql.Statement) bool {
	first := !c.sent
	c.sent = true
	return first || acquires(st)
}

func acquires(st *locksql.Statement) bool {
	for i := range st.Calls {
		if !st.Calls[i].Func.Release() {
			return true
		}
	}
	return false
}

// caller is that of the statement being sent.
func (c *Conn) caller(from site) Caller {
	if from == (site{}) {
		from = c.connector.sites.find(true)
	}
	return from.caller
}

// find leaves out itself, the two of ours that called it, and the caller of
// those, which is database/sql's if it is not ours. It answers nothing where
// nobody asks.
func (c *callSites) find(asked bool) (s site) {
	if !asked {
		return site{}
	}
	var pcs stack
	// The caller of a method of *sql.Conn or *sql.Tx is the sixth then, or before,
	// that of one of *sql.DB the tenth; what else there is nobody knows.
	for _, depth := range [...]int{6, 10, 22, len(pcs)} {
		s = c.read(&pcs, runtime.Callers(5, pcs[:depth]), depth)
		if !s.far {
			break
		}
	}
	return s
}

// read reads a stack of n frames, of which there may be more if that is all that
// was asked for.
func (c *callSites) read(pcs *stack, n, asked int) site {
	c.mu.RLock()
	s, ok := c.sites[*pcs]
	c.mu.RUnlock()
	if ok {
		return s
	}
	s = readStack(slices.Clone(pcs[:n])) // what CallersFrames gets escapes
	s.far = s.far && n == asked && asked < len(pcs)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.sites == nil || len(c.sites) >= sitesMax {
		c.sites = map[stack]site{}
	}
	c.sites[*pcs] = s
	return s
}

func readStack(pcs []uintptr) (s site) {
	frames := runtime.CallersFrames(pcs)
	for {
		f, more := frames.Next()
		switch {
		case ours(f):
		case inStandardSQL(f):
			s.pooled = s.pooled || ofDB(f.Function)
		case inProgram(f.Function):
			s.caller = Caller{f.Function, f.File, f.Line}
			return s
		case s.caller == Caller{}:
			s.caller = Caller{f.Function, f.File, f.Line}
		}
		if !more {
			s.far = true
			return s
		}
	}
}

// ofDB reports whether a function of database/sql is a method of *DB that sends
// a statement, or a closure in one.
func ofDB(function string) bool {
	_, method, _ := strings.Cut(function, "(*DB).")
	method, _, _ = strings.Cut(method, ".")
	switch method {
	case "Exec", "ExecContext", "Query", "QueryContext", "QueryRow", "QueryRowContext":
		return true
	}
	return false
}

// ours reports whether the frame is the library's own. Its commands are
// package main and its tests are callers like any other.
func ours(f runtime.Frame) bool {
	rest, ok := strings.CutPrefix(f.Function, thisPackage)
	if !ok {
		return strings.HasPrefix(f.Function, "github.com/ngrok/sqlmw.")
	}
	return (strings.HasPrefix(rest, ".") || strings.HasPrefix(rest, "/internal/")) && !strings.HasSuffix(f.File, "_test.go")
}

func inProgram(function string) bool {
	if strings.HasPrefix(function, "main.") {
		return true
	}
	rest, ok := strings.CutPrefix(function, mainModule())
	return ok && mainModule() != "" && (strings.HasPrefix(rest, ".") || strings.HasPrefix(rest, "/") || strings.HasPrefix(rest, "_test."))
}

// inStandardSQL also looks at the file: where a method of database/sql was
// inlined into the program, its closures are named after the program's function,
// "main.run.(*DB).ExecContext.func1".
func inStandardSQL(f runtime.Frame) bool {
	return strings.HasPrefix(f.Function, "database/sql.") || strings.HasPrefix(f.Function, "runtime.") ||
		strings.HasSuffix(f.File, "database/sql/sql.go") || strings.HasSuffix(f.File, "database/sql/ctxutil.go")
}
