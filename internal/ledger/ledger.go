// Package ledger keeps what one connection holds: how often each advisory
// lock was taken, at which level, and whether that account can be trusted.
//
// It counts as PostgreSQL does. Session locks outlive the transaction they
// were taken in and are given back one by one; exclusive and share counts are
// separate; transaction locks end with the transaction or with the savepoint
// that precedes them (PostgreSQL manual, 13.3.5 Advisory Locks).
//
// It knows SQL only through [locksql] and nothing of database/sql: who sends
// what, and over which connection, is the driver's business.
package ledger

import (
	"slices"
	"sync"

	"github.com/pgadvlock/pgadvlock/internal/locksql"
)

// State says how far a ledger can be trusted.
type State uint8

const (
	Clean   State = iota // no session lock is held
	Exact                // the session locks held are those in the ledger
	Tainted              // more may be held: something ran that could not be counted
	Escaped              // the raw connection was lent out; anything may have happened on it
)

// String returns the state's name in lower case.
func (s State) String() string {
	return [...]string{"clean", "exact", "tainted", "escaped"}[s]
}

// Lock is one line of the account. Origin is whatever the driver wants to
// know about the first acquire that is still held.
type Lock[Origin any] struct {
	Key    locksql.Key
	Share  bool
	Xact   bool
	Count  int
	Origin Origin
}

// Attempt is one call of a statement that is about to be sent.
type Attempt[Origin any] struct {
	Func   locksql.Func
	Key    locksql.Key
	Origin Origin
}

// Answer is what the server said to one call.
type Answer uint8

const (
	Unknown Answer = iota // it did not say, or not so that it could be understood
	Yes                   // acquired, or released
	No                    // a try that found the lock taken, or an unlock of what was not held
	Null                  // a NULL key: the strict function was not run
)

// End is how a lock ended.
type End uint8

const (
	Unlocked       End = iota // given back by the program
	TransactionEnd            // with its transaction, or a ROLLBACK TO
	Leaked                    // taken back when its connection was returned
	Lost                      // with its connection
)

// String returns the end as telemetry names it.
func (e End) String() string {
	return [...]string{"unlocked", "transaction_end", "leaked", "lost"}[e]
}

// Ended is a lock that is held no more.
type Ended[Origin any] struct {
	Lock[Origin]
	End End
}

// Ledger is the account of one connection. The zero value is a clean ledger.
// Its methods are safe for concurrent use: the connection writes, observers
// such as Connector.Sessions read.
type Ledger[Origin any] struct {
	mu sync.Mutex // guards all below

	oldest, newest *line[Origin]        // the lines in the order of their first acquire
	count          int                  // of them
	xacts          int                  // of those of transaction locks
	index          map[id]*line[Origin] // of all lines; nil while they are few
	marks          []savepoint
	trail          []id // transaction locks in the order taken, for ROLLBACK TO

	pending bool // sent, not answered yet
	waiting []Attempt[Origin]
	doubts  []Attempt[Origin] // ended in an error, perhaps granted all the same
	tainted bool
	escaped bool

	ended   []Ended[Origin] // not fetched by Settled yet
	fetched []Ended[Origin] // what Settled returned last
	spare   *line[Origin]   // one that is not in use, for the next lock

	cursor   bool                // a DECLAREd cursor may still take locks, at FETCH or COMMIT
	prepared map[string]struct{} // PREPAREd statements with a session-level call in them
	lent     bool                // somebody else may have PREPAREd more
}

// id is what makes two acquires the same line.
type id struct {
	key         locksql.Key
	share, xact bool
}

func (at Attempt[O]) id() id { return id{at.Key, at.Func.Share(), !at.Func.Session()} }

type line[Origin any] struct {
	Lock[Origin]
	older, newer *line[Origin]
}

type savepoint struct {
	name  string
	taken int // length of the trail when it was set
}

// few is how many lines are looked through faster than they are looked up.
const few = 8

// line returns the line of a lock that is held; nil otherwise.
func (l *Ledger[O]) line(k id) *line[O] {
	if l.index != nil {
		return l.index[k]
	}
	n := l.newest
	for n != nil && (n.Key != k.key || n.Share != k.share || n.Xact != k.xact) {
		n = n.older
	}
	return n
}

func (l *Ledger[O]) add(at Attempt[O]) {
	k := at.id()
	if old := l.line(k); old != nil {
		old.Count++
		return
	}
	n := l.spare
	if l.spare = nil; n == nil {
		n = new(line[O])
	}
	*n = line[O]{
		Lock:  Lock[O]{Key: at.Key, Share: k.share, Xact: k.xact, Count: 1, Origin: at.Origin},
		older: l.newest,
	}
	if l.newest == nil {
		l.oldest = n
	} else {
		l.newest.newer = n
	}
	l.newest = n
	if k.xact {
		l.xacts++
	}
	switch l.count++; {
	case l.index != nil:
		l.index[k] = n
	case l.count > few:
		l.index = make(map[id]*line[O])
		for n := l.oldest; n != nil; n = n.newer {
			l.index[id{n.Key, n.Share, n.Xact}] = n
		}
	}
}

// remove takes one count away; false when there is none.
func (l *Ledger[O]) remove(k id, end End) bool {
	n := l.line(k)
	if n != nil {
		l.removeFrom(n, k, end)
	}
	return n != nil
}

func (l *Ledger[O]) removeFrom(n *line[O], k id, end End) {
	if n.Count--; n.Count == 0 {
		l.drop(k, n, end)
	}
}

func (l *Ledger[O]) drop(k id, n *line[O], end End) {
	l.ended = append(l.ended, Ended[O]{n.Lock, end})
	l.count--
	delete(l.index, k)
	if n.older == nil {
		l.oldest = n.newer
	} else {
		n.older.newer = n.newer
	}
	if n.newer == nil {
		l.newest = n.older
	} else {
		n.newer.older = n.older
	}
	if k.xact {
		l.xacts--
	}
	n.Lock = Lock[O]{} // of what it refers to nothing is kept
	l.spare = n
}

// dropAll drops the lines of one scope.
func (l *Ledger[O]) dropAll(xact bool, end End) {
	for n := l.oldest; n != nil; n = n.newer { // drop leaves newer as it is
		if n.Xact == xact {
			l.drop(id{n.Key, n.Share, n.Xact}, n, end)
		}
	}
}

// State returns how far the ledger can be trusted now.
func (l *Ledger[O]) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state()
}

func (l *Ledger[O]) state() State {
	switch {
	case l.tainted || l.pending || len(l.doubts) > 0:
		return Tainted
	case l.escaped:
		return Escaped
	case l.count > l.xacts:
		return Exact
	}
	return Clean
}

// Settled returns what the driver needs after it has written to the ledger:
// whether the connection is armed, and the locks that have ended since the
// last time, which are good until the next. While it is armed the driver must look at every statement,
// because some change what is held without naming a lock function: transaction
// control, EXECUTE, DISCARD.
func (l *Ledger[O]) Settled() (armed bool, ended []Ended[O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.fetched)
	if cap(l.fetched) > few {
		l.fetched = nil
	}
	l.ended, l.fetched = l.fetched[:0], l.ended
	return l.state() != Clean || l.xacts > 0 || len(l.prepared) > 0 || l.cursor, l.fetched
}

// Held returns the locks in the ledger, oldest first.
func (l *Ledger[O]) Held() []Lock[O] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.held()
}

func (l *Ledger[O]) held() []Lock[O] {
	var locks []Lock[O]
	for n := l.oldest; n != nil; n = n.newer {
		locks = append(locks, n.Lock)
	}
	return locks
}

// Recent returns at most n of the locks in the ledger, those taken last,
// oldest first.
func (l *Ledger[O]) Recent(n int) []Lock[O] {
	l.mu.Lock()
	defer l.mu.Unlock()
	var locks []Lock[O]
	for r := l.newest; r != nil && len(locks) < n; r = r.older {
		locks = append(locks, r.Lock)
	}
	slices.Reverse(locks)
	return locks
}

// Snapshot returns the state, what is held and what is waited for, as they
// are at one moment.
func (l *Ledger[O]) Snapshot() (State, []Lock[O], []Attempt[O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state(), l.held(), slices.Clone(l.waiting)
}

// Count returns how often the lock that an attempt is for is held already, as
// far as the ledger knows.
func (l *Ledger[O]) Count(at Attempt[O]) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.line(at.id()); n != nil {
		return n.Count
	}
	return 0
}

// Send records that a plain lock statement is about to be sent. Until
// [Ledger.Settle], the ledger is tainted: if the connection is lost in
// between, nobody can say whether the lock was granted.
func (l *Ledger[O]) Send(attempts []Attempt[O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = true
	for _, at := range attempts {
		if at.Func.Blocking() {
			l.waiting = append(l.waiting, at)
		}
	}
}

// Interrupted enters that a Send ended in a panic: nothing is known of it.
func (l *Ledger[O]) Interrupted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tainted = true
	l.answered()
}

// answered ends what Send began.
func (l *Ledger[O]) answered() {
	l.pending = false
	clear(l.waiting)
	l.waiting = l.waiting[:0]
}

// Unsent takes a Send back: the statement never left, or the server refused
// it before running it.
func (l *Ledger[O]) Unsent() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered()
}

// Settle enters what the server answered to the attempts of the last Send, in
// their order. inTransaction says whether the statement left a transaction
// open; outside one, transaction locks are gone by now.
func (l *Ledger[O]) Settle(attempts []Attempt[O], answers []Answer, inTransaction bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answered()
	for i, at := range attempts {
		l.settle(at, answers[i], inTransaction, len(attempts) == 1)
	}
	if !inTransaction {
		l.endTransaction()
	}
}

func (l *Ledger[O]) settle(at Attempt[O], answer Answer, inTransaction, alone bool) {
	f := at.Func
	switch {
	case answer == Unknown:
		l.doubt(at, alone)
	case f == locksql.UnlockAll:
		l.releasedAll()
	case f.Release():
		// A release that contradicts the account: the account is wrong, for
		// instance because one key was spelled in two ways.
		k := at.id()
		known := l.line(k)
		switch {
		case answer == Yes && known != nil:
			l.removeFrom(known, k, Unlocked)
		case answer == Yes, answer == No && known != nil:
			l.tainted = true
		}
	case answer != Yes:
	case at.Key.Kind == locksql.KeyUnknown || at.Key.Kind == locksql.KeyNull:
		// Taken, but under a key that nobody could recognise again.
		l.tainted = l.tainted || f.Session()
	case f.Session():
		// Beside a doubt on the same lock, nobody can say how often it is held.
		l.tainted = l.tainted || l.doubted(at)
		l.add(at)
	case inTransaction:
		l.add(at)
		l.trail = append(l.trail, at.id())
	}
}

// doubt enters an attempt that the server did not answer. A lock that was not
// held before can be looked for; of one that was, nobody can say whether it is
// held once more.
func (l *Ledger[O]) doubt(at Attempt[O], alone bool) {
	if !at.Func.Session() {
		return
	}
	known := at.Key.Kind == locksql.KeyNumber || at.Key.Kind == locksql.KeyExpression
	if alone && known && at.Func.Blocking() && l.line(at.id()) == nil && !l.doubted(at) && !l.tainted && !l.escaped {
		l.doubts = append(l.doubts, at)
		return
	}
	l.tainted = true
}

// doubted reports whether a doubt may be on the lock of an attempt: an
// expression may make any key.
func (l *Ledger[O]) doubted(at Attempt[O]) bool {
	return slices.ContainsFunc(l.doubts, func(d Attempt[O]) bool {
		expression := d.Key.Kind == locksql.KeyExpression || at.Key.Kind == locksql.KeyExpression
		return d.id() == at.id() || expression && d.Key.Space == at.Key.Space && d.Func.Share() == at.Func.Share()
	})
}

// Doubts returns the attempts on session locks that ended in an error and may
// have been granted all the same.
func (l *Ledger[O]) Doubts() []Attempt[O] {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.doubts)
}

// Resolve enters what became of all doubts: the locks that are held.
func (l *Ledger[O]) Resolve(held []Attempt[O]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.doubts = nil
	for _, at := range held {
		l.add(at)
	}
}

// releasedAll enters that the session gave all its session locks back. A
// cursor that is still open may take more, so it keeps the ledger tainted.
func (l *Ledger[O]) releasedAll() {
	l.dropAll(false, Unlocked)
	l.doubts = nil
	l.tainted = l.cursor
}

// Taint records that something is about to run that may take session locks
// unseen. It lasts until all are known to be gone.
func (l *Ledger[O]) Taint() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tainted = true
}

// Declare records a cursor whose query calls a session-level function.
func (l *Ledger[O]) Declare() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tainted, l.cursor = true, true
}

// Escape records that the raw connection was lent out.
func (l *Ledger[O]) Escape() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.escaped, l.lent = true, true
}

// Before enters the steps of a text that is about to be sent, and reports
// whether one of them executes a statement that was PREPAREd with a
// session-level call in it. PREPARE is entered here because an error behind it
// does not undo it.
func (l *Ledger[O]) Before(steps []locksql.Step) (executes bool) {
	if len(steps) == 0 {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range steps {
		switch s.Kind {
		case locksql.StepPrepare:
			l.prepare(s)
		case locksql.StepExecute:
			_, prepared := l.prepared[s.Name]
			executes = executes || prepared || l.lent
		}
	}
	return executes
}

func (l *Ledger[O]) prepare(s locksql.Step) {
	if !s.Session {
		return
	}
	if l.prepared == nil {
		l.prepared = make(map[string]struct{})
	}
	l.prepared[s.Name] = struct{}{}
}

// After enters the steps of a text that the server has run without an error.
func (l *Ledger[O]) After(steps []locksql.Step) {
	if len(steps) == 0 {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range steps {
		switch s.Kind {
		case locksql.StepCommit, locksql.StepRollback, locksql.StepPrepareTransaction:
			// AND CHAIN opens the next one, which begins with nothing.
			l.endTransaction()
		case locksql.StepSavepoint:
			l.marks = append(l.marks, savepoint{s.Name, len(l.trail)})
		case locksql.StepRelease:
			if i := l.mark(s.Name); i >= 0 {
				l.marks = l.marks[:i]
			}
		case locksql.StepRollbackTo:
			l.rollbackTo(s.Name)
		case locksql.StepPrepare:
			l.prepare(s)
		case locksql.StepDeallocate:
			if s.Name == "" {
				clear(l.prepared)
			} else {
				delete(l.prepared, s.Name)
			}
		case locksql.StepDiscardAll:
			clear(l.prepared)
			l.cursor = false // DISCARD ALL closes all portals
			l.releasedAll()
		}
	}
}

// mark returns the index of the innermost savepoint of that name, or -1.
func (l *Ledger[O]) mark(name string) int {
	for i := len(l.marks) - 1; i >= 0; i-- {
		if l.marks[i].name == name {
			return i
		}
	}
	return -1
}

// rollbackTo drops the transaction locks taken after the savepoint. One that
// the ledger never saw was set before the first lock was taken.
func (l *Ledger[O]) rollbackTo(name string) {
	taken := 0
	if i := l.mark(name); i >= 0 {
		taken = l.marks[i].taken
		l.marks = l.marks[:i+1]
	} else {
		l.marks = nil
	}
	for _, k := range l.trail[taken:] {
		l.remove(k, TransactionEnd)
	}
	l.trail = l.trail[:taken]
}

// EndTransaction enters that the transaction is over, however it ended.
func (l *Ledger[O]) EndTransaction() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endTransaction()
}

func (l *Ledger[O]) endTransaction() {
	if l.xacts > 0 {
		l.dropAll(true, TransactionEnd)
	}
	l.trail, l.marks = nil, nil
}

// Returned enters that the connection holds nothing any more and is idle: all
// session locks were taken back or lost, no transaction is open, and a cursor
// WITH HOLD has run its query at COMMIT. What was PREPAREd stays.
func (l *Ledger[O]) Returned(end End) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endTransaction()
	l.dropAll(false, end)
	l.answered()
	l.doubts = nil
	l.tainted, l.escaped, l.cursor = false, false, false
}
