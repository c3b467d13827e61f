package main

// The demo: three scenes on real servers, each played once on plain pgx and
// once on pgadvlock, with the two accounts side by side.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// scene is one story. play tells it on one driver; shows says whether the two
// accounts show what the title promises.
type scene struct {
	title string
	story []string
	play  func(context.Context, stage) (account, error)
	shows func(pgx, ours account) error
}

// account is what became of it, a line for each question.
type account struct {
	lines []line
	ok    map[string]bool // what shows is judged by
}

type line struct{ question, answer string }

func (a *account) tell(question, format string, args ...any) {
	a.lines = append(a.lines, line{question, fmt.Sprintf(format, args...)})
}

func (a *account) mark(name string, ok bool) {
	if a.ok == nil {
		a.ok = map[string]bool{}
	}
	a.ok[name] = ok
}

// stage is the place where a scene is played: one driver, one database.
type stage struct {
	open     func(dsn string) (*sql.DB, error)
	direct   string // DSN of the database
	pooled   string // the same through PgBouncer in transaction mode
	observer *sql.DB
	events   *events
}

// events collects what pgadvlock reports.
type events struct {
	mu   sync.Mutex
	seen []pgadvlock.Event
}

func (e *events) handle(_ context.Context, event pgadvlock.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seen = append(e.seen, event)
}

// take returns the events since the last take, of one rule.
func (e *events) take(rule pgadvlock.Rule) []pgadvlock.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	var taken []pgadvlock.Event
	for _, event := range e.seen {
		if event.Rule == rule {
			taken = append(taken, event)
		}
	}
	e.seen = nil
	return taken
}

var scenes = []scene{
	{
		title: "A worker forgets to unlock, and its connection goes back into the pool",
		story: []string{
			`worker A   conn.ExecContext(ctx, "SELECT pg_advisory_lock(4711)"); conn.Close()`,
			`worker B   SELECT pg_try_advisory_lock(4711), for two seconds, on a connection of its own`,
		},
		play: leak,
		shows: func(pgx, ours account) error {
			return all(claim{"worker B stays blocked on pgx", !pgx.ok["got it"]},
				claim{"worker B gets the lock on pgadvlock", ours.ok["got it"]},
				claim{"the report names key and call site", ours.ok["told"]})
		},
	},
	{
		title: "Lock and unlock through *sql.DB",
		story: []string{
			`db.Exec("SELECT pg_advisory_lock(42)"), work, db.QueryRow("SELECT pg_advisory_unlock(42)")`,
			`while another request uses the connection that the lock was taken on`,
		},
		play: throughPool,
		shows: func(pgx, ours account) error {
			return all(claim{"the unlock misses on pgx and the lock stays", pgx.ok["missed"] && pgx.ok["left"]},
				claim{"pgadvlock refuses it and names the line", ours.ok["refused"]},
				claim{"nothing stays locked on pgadvlock", !ours.ok["left"]})
		},
	},
	{
		title: "Two workers behind PgBouncer in transaction mode",
		story: []string{
			`both       SELECT pg_try_advisory_lock(7), each on its own connection to PgBouncer`,
		},
		play: behindBouncer,
		shows: func(pgx, ours account) error {
			return all(claim{"two workers hold one lock on pgx", pgx.ok["both"]},
				claim{"pgadvlock refuses both", ours.ok["refused"]})
		},
	},
}

type claim struct {
	what string
	true bool
}

func all(claims ...claim) error {
	for _, c := range claims {
		if !c.true {
			return errors.New("not shown: " + c.what)
		}
	}
	return nil
}

// leak is scene 1.
func leak(ctx context.Context, s stage) (a account, err error) {
	worker, err := s.open(s.direct)
	if err != nil {
		return a, err
	}
	defer worker.Close()
	conn, err := worker.Conn(ctx)
	if err != nil {
		return a, err
	}
	if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(4711)"); err != nil {
		return a, err
	}
	if err := conn.Close(); err != nil { // and no unlock before it
		return a, err
	}

	start, tries, got := time.Now(), 0, false
	for ; !got && time.Since(start) < 2*time.Second; tries++ {
		if tries > 0 {
			time.Sleep(50 * time.Millisecond)
		}
		if err := s.observer.QueryRowContext(ctx, "SELECT pg_try_advisory_lock(4711)").Scan(&got); err != nil {
			return a, err
		}
	}
	a.mark("got it", got)
	if got {
		a.tell("worker B", "gets the lock at once")
		a.tell("worker A's connection", "idle in the pool, holding nothing")
	} else {
		a.tell("worker B", "does not get the lock in %d tries", tries)
		var state string
		var pid int
		err := s.observer.QueryRowContext(ctx, `SELECT a.pid, a.state FROM pg_locks l JOIN pg_stat_activity a USING (pid)
			WHERE l.locktype = 'advisory' AND l.objid = 4711 AND l.granted`).Scan(&pid, &state)
		if err != nil {
			return a, err
		}
		a.tell("worker A's connection", "%s in the pool (pid %d), holding the lock for as long as it lives", state, pid)
	}
	a.hear(s, pgadvlock.RuleLeakedSessionLock)
	return a, nil
}

// hear adds what was reported under a rule.
func (a *account) hear(s stage, rule pgadvlock.Rule) {
	if s.events == nil {
		a.tell("you are told", "nothing")
		return
	}
	heard := s.events.take(rule)
	if len(heard) == 0 {
		a.tell("you are told", "nothing")
		return
	}
	e := heard[0]
	lock := e.Locks[0]
	a.tell("you are told", "%s", e.Rule)
	a.tell("  key", "%s (%s)", lock.Key, lock.Mode)
	a.tell("  at", "%s:%d", filepath.Base(e.Caller.File), e.Caller.Line)
	a.mark("told", e.Caller.Line > 0 && filepath.Base(e.Caller.File) == "demo.go" && lock.Key.String() != "")
}

// throughPool is scene 2.
func throughPool(ctx context.Context, s stage) (a account, err error) {
	db, err := s.open(s.direct)
	if err != nil {
		return a, err
	}
	defer db.Close()
	_, err = db.ExecContext(ctx, "SELECT pg_advisory_lock(42)")
	var refusal *pgadvlock.RuleError
	if errors.As(err, &refusal) {
		a.tell("lock", "refused, before anything is sent")
		a.tell("the error says", "%v", err)
		a.mark("refused", errors.Is(err, pgadvlock.RulePooledSessionLock) && filepath.Base(refusal.Event.Caller.File) == "demo.go")
		left, err := heldBy(ctx, s.observer, 42)
		a.mark("left", left)
		a.tell("afterwards", "nothing is locked; the program is told at its first run, not at 03:40")
		return a, err
	}
	if err != nil {
		return a, err
	}
	a.tell("lock", "granted")

	other, err := db.Conn(ctx) // another request gets that connection
	if err != nil {
		return a, err
	}
	defer other.Close()
	var unlocked bool
	if err := db.QueryRowContext(ctx, "SELECT pg_advisory_unlock(42)").Scan(&unlocked); err != nil {
		return a, err
	}
	a.tell("unlock", "answers %t, which db.Exec would throw away", unlocked)
	left, err := heldBy(ctx, s.observer, 42)
	if err != nil {
		return a, err
	}
	a.tell("afterwards", "still locked, by an idle connection, and nobody is told")
	a.mark("missed", !unlocked)
	a.mark("left", left)
	return a, nil
}

func heldBy(ctx context.Context, observer *sql.DB, key int) (held bool, err error) {
	err = observer.QueryRowContext(ctx, "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND granted"+
		" AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))", key).Scan(&held)
	return held, err
}

// behindBouncer is scene 3.
func behindBouncer(ctx context.Context, s stage) (a account, err error) {
	var got [2]bool
	var refusal error
	for i, name := range []string{"worker A", "worker B"} {
		db, err := s.open(s.pooled)
		if err != nil {
			return a, err
		}
		defer db.Close()
		conn, err := db.Conn(ctx)
		if err != nil {
			return a, err
		}
		defer conn.Close()
		err = conn.QueryRowContext(ctx, "SELECT pg_try_advisory_lock(7)").Scan(&got[i])
		switch {
		case errors.Is(err, pgadvlock.RuleTransactionPooling):
			a.tell(name, "refused, before anything is sent")
			refusal = err
		case err != nil:
			return a, err
		default:
			a.tell(name, "is answered %t", got[i])
		}
	}
	a.mark("both", got[0] && got[1])
	a.mark("refused", refusal != nil && !got[0] && !got[1])
	if refusal != nil {
		a.tell("the error says", "%v", refusal)
	}
	held, err := heldBy(ctx, s.observer, 7)
	if err != nil {
		return a, err
	}
	if held {
		a.tell("the lock", "guards nothing: both go on. It stays with PgBouncer's connection when both have gone")
	} else {
		a.tell("the lock", "is held by nobody")
	}
	return a, nil
}

// demo plays the scenes and prints them. It fails unless each showed what it
// says.
func demo(ctx context.Context, out io.Writer) error {
	fmt.Fprintln(out, "Starting PostgreSQL and PgBouncer in a temporary directory ...")
	server, err := pgtest.Start()
	if err != nil {
		return err
	}
	defer server.Close()
	if !server.HasBouncer() {
		return errors.New("no PgBouncer found: install the package pgbouncer, or set PGADVLOCK_TEST_PGBOUNCER")
	}
	fmt.Fprintf(out, "PostgreSQL %d.%d, PgBouncer; each scene in a database of its own.\n", server.Version()/10000, server.Version()%10000)

	failed := 0
	for i, sc := range scenes {
		fmt.Fprintf(out, "\nScene %d  %s\n\n", i+1, sc.title)
		for _, l := range sc.story {
			fmt.Fprintf(out, "    %s\n", l)
		}
		var accounts [2]account
		for j, driver := range []string{"pgx", "pgadvlock"} {
			db := fmt.Sprintf("scene%d_%s", i+1, driver)
			if err := server.CreateDB(db); err != nil {
				return err
			}
			if accounts[j], err = playOn(ctx, sc, server, driver, db); err != nil {
				return fmt.Errorf("scene %d on %s: %w", i+1, driver, err)
			}
		}
		fmt.Fprintln(out)
		sideBySide(out, accounts)
		if err := sc.shows(accounts[0], accounts[1]); err != nil {
			fmt.Fprintf(out, "\n    %v\n", err)
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d scenes did not show what they say", failed, len(scenes))
	}
	fmt.Fprintf(out, "\nAll %d scenes showed what they say.\n", len(scenes))
	return nil
}

func playOn(ctx context.Context, sc scene, server *pgtest.Server, driver, db string) (account, error) {
	observer, err := sql.Open("pgx", server.DSN(db))
	if err != nil {
		return account{}, err
	}
	defer observer.Close()
	observer.SetMaxOpenConns(1)
	s := stage{direct: server.DSN(db), pooled: server.BouncerDSN(db, "transaction"), observer: observer}
	// The demo shows statements as PgBouncer's transaction mode needs them.
	s.pooled += "&default_query_exec_mode=exec"
	s.open = func(dsn string) (*sql.DB, error) { return sql.Open(driver, dsn) }
	if driver == "pgadvlock" {
		s.events = &events{}
		s.open = func(dsn string) (*sql.DB, error) {
			c, err := pgadvlock.NewConnector(dsn, pgadvlock.WithEventHandler(s.events.handle), pgadvlock.WithLogger(slog.New(slog.DiscardHandler)))
			if err != nil {
				return nil, err
			}
			return sql.OpenDB(c), nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return sc.play(ctx, s)
}

const (
	questionWidth = 24
	answerWidth   = 38
)

// questions are those of both accounts, each once; what only the second asks
// stands behind the question that it follows there.
func questions(accounts [2]account) []line {
	all := slices.Clone(accounts[0].lines)
	next := 0
	for _, q := range accounts[1].lines {
		i := slices.IndexFunc(all, func(l line) bool { return l.question == q.question })
		if i < 0 {
			i = next
			all = slices.Insert(all, i, q)
		}
		next = i + 1
	}
	return all
}

// sideBySide prints two accounts as a table with wrapped cells.
func sideBySide(out io.Writer, accounts [2]account) {
	row := func(cells ...string) {
		fmt.Fprintln(out, strings.TrimRight(fmt.Sprintf("    %-*s | %-*s | %s", questionWidth, cells[0], answerWidth, cells[1], cells[2]), " "))
	}
	row("", "pgx", "pgadvlock")
	row(strings.Repeat("-", questionWidth), strings.Repeat("-", answerWidth), strings.Repeat("-", answerWidth))
	for _, q := range questions(accounts) {
		left, right := wrap(accounts[0].answer(q.question), answerWidth), wrap(accounts[1].answer(q.question), answerWidth)
		for i := range max(len(left), len(right)) {
			question := ""
			if i == 0 {
				question = q.question
			}
			row(question, at(left, i), at(right, i))
		}
	}
}

func (a account) answer(question string) string {
	for _, l := range a.lines {
		if l.question == question {
			return l.answer
		}
	}
	return ""
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}

// wrap breaks text at blanks into lines of at most width bytes, where it can.
func wrap(text string, width int) []string {
	var lines []string
	current := ""
	for word := range strings.FieldsSeq(text) {
		if current != "" && len(current)+1+len(word) > width {
			lines = append(lines, current)
			current = ""
		}
		if current != "" {
			current += " "
		}
		current += word
	}
	return append(lines, current)
}
