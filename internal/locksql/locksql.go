// Package locksql turns SQL text into the advisory-lock calls in it.
//
// It owns the reading: a lexer that follows PostgreSQL's scan.l (14 to 18), the one statement form whose locks can be
// counted exactly, and the answer "something in here may lock" for every other form. It knows nothing of connections,
// of database/sql, or of what is held.
//
// A statement is judged by what the server will do with it, never by more than its text. Where the text does not tell,
// the judgement is the careful one (Opaque, Session): an alarm too many costs a round trip, a session lock nobody saw
// goes back into the pool.
//
// Not seen: calls inside objects defined on the server (functions, triggers, views), SQL that functions such as
// query_to_xml or dblink run from a string, and a name whose letters of "advisory" are themselves Unicode-escaped.
package locksql

// Func is one of PostgreSQL's advisory-lock functions.
// See https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-ADVISORY-LOCKS.
type Func uint8

const (
	Lock Func = iota
	LockShared
	TryLock
	TryLockShared
	XactLock
	XactLockShared
	TryXactLock
	TryXactLockShared
	Unlock
	UnlockShared
	UnlockAll
)

var funcNames = [...]string{
	Lock:              "pg_advisory_lock",
	LockShared:        "pg_advisory_lock_shared",
	TryLock:           "pg_try_advisory_lock",
	TryLockShared:     "pg_try_advisory_lock_shared",
	XactLock:          "pg_advisory_xact_lock",
	XactLockShared:    "pg_advisory_xact_lock_shared",
	TryXactLock:       "pg_try_advisory_xact_lock",
	TryXactLockShared: "pg_try_advisory_xact_lock_shared",
	Unlock:            "pg_advisory_unlock",
	UnlockShared:      "pg_advisory_unlock_shared",
	UnlockAll:         "pg_advisory_unlock_all",
}

// familyFunc finds the function with that exact, folded name.
func familyFunc(name string) (Func, bool) {
	for f, n := range funcNames {
		if n == name {
			return Func(f), true
		}
	}
	return 0, false
}

// String is the function's name: "pg_advisory_lock".
func (f Func) String() string { return funcNames[f] }

// Session reports whether f takes or releases session-level locks; the others take transaction-level ones.
func (f Func) Session() bool { return f < XactLock || f.Release() }

// Share reports whether f works on the share mode. UnlockAll works on both and is not one of them.
func (f Func) Share() bool {
	switch f {
	case LockShared, TryLockShared, XactLockShared, TryXactLockShared, UnlockShared:
		return true
	}
	return false
}

// Try reports whether f answers instead of waiting.
func (f Func) Try() bool {
	switch f {
	case TryLock, TryLockShared, TryXactLock, TryXactLockShared:
		return true
	}
	return false
}

// Release reports whether f gives locks back.
func (f Func) Release() bool { return f >= Unlock }

// Blocking reports whether f may wait for another session.
func (f Func) Blocking() bool { return !f.Release() && !f.Try() }

// Form says how much of a text is known.
type Form uint8

const (
	NoCall Form = iota // executing it calls no lock function that its text shows
	Plain              // SELECT call [AS name] {, call [AS name]} and nothing more
	Opaque             // a lock function may run, how often and with which key is not known
)

func (f Form) String() string { return [...]string{"no call", "plain", "opaque"}[f] }

// Statement is what one text does. It is shared between callers and must not be changed.
type Statement struct {
	Form Form

	// Calls of a Plain text: all of them, one a result column, in order. Of an Opaque one: the calls of
	// pg_advisory_* that are written in it, in text order, the first hundred; for reports.
	Calls []Call

	// Session: executing the text may take or release session-level locks. Set by a session-level function and,
	// in an Opaque text, by a configured function, CALL, and whatever cannot be known.
	Session bool

	// Deferred: DECLARE CURSOR with a call, which runs later, at FETCH or COMMIT. The Form is Opaque.
	Deferred bool

	// PerRow: a lock function is evaluated for the rows of a table, so it may lock for rows that LIMIT or WHERE
	// drops. Rows that the statement makes itself count only where it may drop some. The Form is Opaque.
	PerRow bool

	// Steps is what the text does to transactions and prepared statements, in order, at most one per statement.
	Steps []Step
}

// Call is one call of an advisory-lock function.
type Call struct {
	Func       Func
	Space      Space
	Args       []Arg // nil for UnlockAll only
	Start, End int   // bytes of the call in the text; inside a string with escapes: of that string
}

// Arg is one argument of a call.
type Arg struct {
	// Expr is for reports: as written, but comments dropped, white space and letter case folded, string literals as
	// '…', parameters as $n, at most 256 bytes.
	Expr string
	Weak bool // made by the 32-bit hashtext(): even odds of a collision at 77,000 keys

	value  value
	pieces []piece // the unmasked expression; value.kind is isExpression
}

// Space is one of the two key spaces, which never conflict with each other.
type Space uint8

const (
	Bigint Space = iota // one bigint
	Pair                // two int
)

func (s Space) String() string { return [...]string{"bigint", "int,int"}[s] }

// StepKind is what a [Step] does.
type StepKind uint8

const (
	StepBegin              StepKind = iota // BEGIN, START TRANSACTION
	StepCommit                             // COMMIT, END; not COMMIT PREPARED, which ends no transaction of this session
	StepRollback                           // ROLLBACK, ABORT; not ROLLBACK PREPARED
	StepSavepoint                          // SAVEPOINT name
	StepRelease                            // RELEASE name
	StepRollbackTo                         // ROLLBACK TO name
	StepPrepareTransaction                 // PREPARE TRANSACTION
	StepSetTransaction                     // SET TRANSACTION ISOLATION LEVEL, SET transaction_isolation
	StepSetSession                         // SET SESSION CHARACTERISTICS, SET or RESET default_transaction_isolation, RESET ALL
	StepPrepare                            // PREPARE name
	StepExecute                            // EXECUTE name, also in CREATE TABLE AS and EXPLAIN ANALYZE
	StepDeallocate                         // DEALLOCATE name; Name "" is ALL
	StepDiscardAll                         // DISCARD ALL
)

func (k StepKind) String() string {
	return [...]string{"BEGIN", "COMMIT", "ROLLBACK", "SAVEPOINT", "RELEASE", "ROLLBACK TO", "PREPARE TRANSACTION",
		"SET TRANSACTION", "SET SESSION CHARACTERISTICS", "PREPARE", "EXECUTE", "DEALLOCATE", "DISCARD ALL"}[k]
}

// Step is one statement that changes what a transaction holds or what EXECUTE would run.
type Step struct {
	Kind    StepKind
	Name    string // of the savepoint or prepared statement, folded as the server folds it
	Chain   bool   // COMMIT or ROLLBACK AND CHAIN: the next transaction begins at once
	Locks   bool   // StepPrepare: the prepared statement calls a lock function
	Session bool   // StepPrepare: a session-level one, or one that cannot be known

	// Isolation is "read uncommitted", "read committed", "repeatable read" or "serializable"; "" in StepBegin and
	// StepSetSession is the default. A SET TRANSACTION that sets no isolation level is no step.
	Isolation string
}
