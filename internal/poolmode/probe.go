package poolmode

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// This file owns the experiments, and what each of them proves.
//
// There are two connections, C and B. Pooling is proven when one backend has
// served both, when C was moved from one backend to another, or when somebody else
// has used C's backend. Session pooling is proven when C, idle, hears what only
// its backend can have told it.

// How long to wait for what. An answer is measured by the round trip: what is ample
// on a loopback is nothing across an ocean, or in the queue of a busy pool.
const (
	stepsFloor, stepsTrips     = 250 * time.Millisecond, 25 // for the answers of steps 2 and 3 together, and again for step 4's
	connectFloor, connectTrips = time.Second, 25            // for each connection: TLS, SCRAM or an auth_query say nothing about the pool
	queueFloor, queueTrips     = 80 * time.Millisecond, 4   // until a question counts as queued
	firstWindow, secondWindow  = 100 * time.Millisecond, 500 * time.Millisecond
)

// rounds is how often step 3 looks. Through transaction pooling under load, two
// rounds missed 0.03 % of the poolers, and three none.
const rounds = 3

// Probe finds out the pool mode by experiments on two connections of its own. They
// are made by dial, which must lead where the connection that first was asked on
// leads, as the same user to the same database; Probe takes them over, and
// closes them before it returns.
//
// It never fails: what cannot be proven is [Unknown], with the reason as evidence.
// When ctx ends it returns at once. Else it takes, mostly, milliseconds, and at most
// 250 ms or 25 round trips, whichever is longer, to see whether backends are shared;
// where they do not seem to be, as much and 600 ms more; as much again to tidy up and
// to tell statement from transaction pooling; and a second or 25 round trips for
// each connection. No goroutine of its own outlives it.
//
// What it can leave behind: where backends are shared, one that listens to a channel
// whose name nobody knows, if the probe does not meet it again; and, with a
// PgBouncer that shares prepared statements, one of those as every client leaves
// them. Statement pooling closes the backend on which the probe tries BEGIN.
func Probe(ctx context.Context, first First, dial func(context.Context) (*pgconn.PgConn, error)) Verdict {
	if first.Direct {
		return Verdict{Mode: Direct, Evidence: fmt.Sprintf("backend %d greeted the connection and sees its port", first.BackendPID)}
	}
	p := &probe{ctx: ctx, dial: dial, roundTrip: first.RoundTrip}
	defer p.close()
	mode := Unknown
	err := p.experiment(first)
	if f, ok := errors.AsType[*finding](err); ok {
		mode = f.mode
		if mode == Transaction && p.refusesTransactions() {
			mode = Statement
		}
	}
	if ctx.Err() != nil {
		mode, err = Unknown, fmt.Errorf("the probe was ended: %w", context.Cause(ctx))
	}
	return Verdict{Mode: mode, Evidence: err.Error(), RoundTrips: p.trips}
}

// probe is one run of Probe.
type probe struct {
	ctx       context.Context
	dial      func(context.Context) (*pgconn.PgConn, error)
	b, c      *conn
	roundTrip time.Duration
	deadline  time.Time // of the answers
	trips     int
}

// backend is one process of one server. Its pid alone is not: two servers behind
// one address may have the same.
type backend struct {
	pid      uint32
	start    string
	server   string // the postmaster's start
	database string
}

// finding is a proof. It ends the experiments as an error does.
type finding struct {
	mode     Mode
	evidence string
}

func (f *finding) Error() string { return f.evidence }

// pooled is the finding that a client is not alone with its backend. Whether it is
// between transactions or between statements is not known at that point.
func pooled(format string, args ...any) error {
	return &finding{Transaction, fmt.Sprintf(format, args...)}
}

// experiment goes through the steps until there is a finding, or a reason why there
// is none: its error is never nil.
func (p *probe) experiment(first First) error {
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))
	var err error
	if p.c, err = p.connect(); err != nil {
		return err
	}
	if err := p.renamed(); err != nil {
		return err
	}
	if p.b, err = p.connect(); err != nil {
		return err
	}
	for range rounds {
		if err := p.shared(); err != nil {
			return err
		}
	}
	// One pid can agree by chance where a pooler's numbers are a counter. Three that
	// agree, on connections that share no backend, are the backends' own.
	if first.SamePID && p.c.greeting == p.c.backend.pid && p.b.greeting == p.b.backend.pid {
		return &finding{Direct, fmt.Sprintf("three connections were greeted by the backends that serve them: %d, %d and %d",
			first.BackendPID, p.c.backend.pid, p.b.backend.pid)}
	}
	err = p.pinned()
	if _, ok := errors.AsType[*finding](err); ok {
		return err
	}
	return fmt.Errorf("no backend was seen to be shared, but session pooling is not proven: %w", err)
}

// patience is how long to wait for what takes so many round trips.
func (p *probe) patience(floor time.Duration, trips int) time.Duration {
	return max(floor, time.Duration(trips)*p.roundTrip)
}

// connect makes one of the two connections. Its time is not taken from the answers'.
func (p *probe) connect() (*conn, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(p.ctx, p.patience(connectFloor, connectTrips))
	defer cancel()
	p.trips++
	pg, err := p.dial(ctx)
	if err != nil {
		if refusal, ok := errors.AsType[*pgconn.PgError](err); ok {
			err = refusal // without the account of each address tried
		}
		return nil, fmt.Errorf("the probe got no connection of its own: %w", err)
	}
	p.deadline = p.deadline.Add(time.Since(begin))
	return take(p.ctx, pg)
}

func (p *probe) close() {
	for _, c := range []*conn{p.b, p.c} {
		if c != nil {
			c.close()
		}
	}
}

// Every question has who answers as its first columns. The names are qualified
// against a hostile search_path. The times are in their binary form, which no
// setting of the session touches: the backends of a pool may differ in TimeZone
// and DateStyle.
const (
	who = "pg_catalog.pg_backend_pid()" +
		", pg_catalog.encode(pg_catalog.timestamptz_send(s.backend_start), 'hex')" +
		", pg_catalog.encode(pg_catalog.timestamptz_send(pg_catalog.pg_postmaster_start_time()), 'hex')" +
		", pg_catalog.current_database()"
	fromSelf = " FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) AS s"
	whoAmI   = "SELECT " + who + fromSelf
)

// question asks in the simple protocol, perhaps several statements, and returns
// up to two columns behind those of who.
func (p *probe) question(c *conn, sql string) ([2]string, error) {
	p.trips++
	if err := c.ask(p.deadline, &pgproto3.Query{String: sql}); err != nil {
		return [2]string{}, err
	}
	return p.reply(c, p.deadline)
}

// reply waits for the answer to the question on its way. It is a finding if another
// backend of the same server gives it than before. Of the same server: a proxy
// that spreads statements over several may still leave a client one backend on each.
func (p *probe) reply(c *conn, until time.Time) (columns [2]string, err error) {
	row, err := c.await(until)
	if err != nil {
		return columns, err
	}
	if len(row) < 4 {
		return columns, errors.New("the answer is not what was asked for")
	}
	pid, err := parsePID(row[0])
	if err != nil {
		return columns, err
	}
	copy(columns[:], row[4:])
	before, now := c.backend, backend{pid: pid, start: row[1], server: row[2], database: row[3]}
	c.backend = now
	if before.server == now.server && before != now {
		return columns, pooled("a client connection was moved from backend %d to %d", before.pid, now.pid)
	}
	return columns, nil
}

// renamed is step 2. A pooler that shares out prepared statements must give them
// names of its own. PgBouncer does so since 1.21 (max_prepared_statements, on by
// default since 1.24), in transaction and statement mode only.
//
// It is C's first question too, and measures what a question costs through the pool.
func (p *probe) renamed() error {
	// The text is always the same: PgBouncer does not close what its client closes, but
	// keeps it for the next one with the same text.
	const statement = "SELECT 1 AS pgadvlock_probe"
	const names = "SELECT " + who +
		", (SELECT pg_catalog.string_agg(p.name, ' ') FROM pg_catalog.pg_prepared_statements AS p" +
		" WHERE p.statement OPERATOR(pg_catalog.=) '" + statement + "')" + fromSelf
	name := nonce()
	begin, had := time.Now(), p.patience(stepsFloor, stepsTrips)
	p.trips++
	err := p.c.ask(p.deadline,
		&pgproto3.Parse{Name: name, Query: statement},
		&pgproto3.Parse{Query: names},
		&pgproto3.Bind{},
		&pgproto3.Execute{},
		&pgproto3.Close{ObjectType: 'S', Name: name},
		&pgproto3.Sync{})
	if err != nil {
		return err
	}
	answer, err := p.reply(p.c, p.deadline)
	if errors.Is(err, errSilent) {
		return errors.New("the pool has no second connection free, or hangs: the probe was greeted, but not answered")
	}
	if err != nil {
		return err
	}
	p.roundTrip = max(p.roundTrip, time.Since(begin))
	p.deadline = p.deadline.Add(p.patience(stepsFloor, stepsTrips) - had)

	known := strings.Fields(answer[0])
	i := slices.IndexFunc(known, func(name string) bool { return strings.HasPrefix(name, "PGBOUNCER_") })
	if i >= 0 && !slices.Contains(known, name) {
		return pooled("a prepared statement was renamed to %s", known[i])
	}
	return nil
}

// shared is a round of step 3: C leaves a mark on its backend X and is idle, B looks
// whose backend is its own, and whether the mark is still on X.
//
// The first round's mark follows step 2's question: a pool that hands out its
// backends in turn would give two connections that alternate one each for ever.
func (p *probe) shared() error {
	// The mark is near the beginning of the text, of which the server keeps 99 bytes at
	// least (track_activity_query_size). It is no comment: proxies strip those. C
	// looks itself whether it can be seen: track_activities may be off.
	mark := nonce()
	leave := "SELECT '" + mark + "'; SELECT " + who + ", pg_catalog.strpos(s.query, '" + mark + "')" + fromSelf
	left, err := p.question(p.c, leave)
	if err != nil {
		return silence(err, "a connection of the probe's own is not answered any more")
	}
	x := p.c.backend

	look := fmt.Sprintf("SELECT %s, x.state, pg_catalog.strpos(x.query, '%s')%s LEFT JOIN pg_catalog.pg_stat_get_activity(%d) AS x ON true",
		who, mark, fromSelf, x.pid)
	p.trips++
	if err := p.b.ask(p.deadline, &pgproto3.Query{String: look}); err != nil {
		return err
	}
	seen, err := p.reply(p.b, time.Now().Add(p.patience(queueFloor, queueTrips)))
	if errors.Is(err, errSilent) {
		// Who shares a pool is served in the order of arrival: then C's answer cannot come
		// before B's. The mark is the same, so that B finds it whenever it is served. It
		// may be late for another reason too: PgBouncer may have to connect for it first.
		if _, err := p.question(p.c, leave); err != nil {
			return silence(err, "neither of two connections is answered: the pool or the server is too busy")
		}
		seen, err = p.reply(p.b, p.deadline)
	}
	if err != nil {
		return silence(err, "the pool has no second connection free: one is answered while another waits")
	}
	y := p.b.backend
	state, found := seen[0], isMarked(seen[1])
	switch {
	case y == x:
		return pooled("two client connections were given backend %d", x.pid)
	case y.server != x.server:
		return nil // what one server knows of another's pid is no evidence
	case isMarked(left[0]) && !found && state != "" && state != "disabled": // "" where it may not be read
		return pooled("backend %d was used by somebody else while its client was idle", x.pid)
	}
	return nil
}

// isMarked reads what strpos answered: a position, or null.
func isMarked(position string) bool { return position != "0" && position != "" }

// silence replaces errSilent by what it means.
func silence(err error, meaning string) error {
	if errors.Is(err, errSilent) {
		return errors.New(meaning)
	}
	return err
}

// pinned is step 4: C listens and is idle, B notifies. That C hears it from B's
// backend proves that C's backend is left to it.
//
// Silence is weaker. It counts only twice, if B, which listens too, heard it, and if
// it does not even come with C's next answer: before that, the backend of a
// session would have sent it, however slow it is.
//
// It always returns an error, as experiment does.
func (p *probe) pinned() error {
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))
	channel := nonce()
	listening := map[backend]bool{}
	defer p.unlisten(channel, listening)

	listen := func(c *conn, command string) error {
		_, err := p.question(c, command+"; "+whoAmI)
		if answered(err) {
			listening[c.backend] = true
		}
		return err
	}
	if err := listen(p.c, "LISTEN "+channel); err != nil {
		return refused("LISTEN", err)
	}
	x := p.c.backend

	late := false
	for _, window := range []time.Duration{firstWindow, secondWindow} {
		p.c.heard, p.b.heard = nil, nil
		// A commit with a notification in it takes a lock that is one for the whole
		// cluster. The server must end that wait itself: it would not see the socket close.
		if err := listen(p.b, "SELECT pg_catalog.set_config('lock_timeout', '200ms', true); LISTEN "+channel+"; NOTIFY "+channel); err != nil {
			return refused("NOTIFY", err)
		}
		y := p.b.backend
		switch {
		case y == x:
			return pooled("two client connections were given backend %d", x.pid)
		case y.server != x.server || y.database != x.database:
			return errors.New("two connections lead to different servers or databases")
		}
		if n, err := p.b.hear(channel, time.Now().Add(firstWindow)); err != nil || n.pid != y.pid {
			return errors.New("a notification did not come back to its sender")
		}
		n, err := p.c.hear(channel, time.Now().Add(window))
		p.deadline = p.deadline.Add(window)
		if err != nil && !errors.Is(err, errSilent) {
			return err
		}
		heard := err == nil
		answer, err := p.question(p.c, "SELECT "+who+", (SELECT pg_catalog.count(*) FROM pg_catalog.pg_listening_channels() AS l(channel)"+
			" WHERE l.channel OPERATOR(pg_catalog.=) '"+channel+"')"+fromSelf)
		listens := answer[0] == "1"
		switch {
		case err != nil:
			return silence(err, "the connection that LISTENs is not answered any more")
		case p.c.backend != x:
			return errors.New("statements of one connection lead to different servers")
		case heard && n.pid != y.pid:
			return fmt.Errorf("a notification of backend %d's came from %d", y.pid, n.pid)
		case heard && !listens:
			return errors.New("it is a proxy that LISTENs, not the backend")
		case heard:
			return &finding{Session, fmt.Sprintf("a notification from backend %d reached the idle client connection of backend %d", y.pid, x.pid)}
		case len(p.c.heard) > 0:
			late = true
		}
	}
	if late {
		return errors.New("notifications come only with an answer")
	}
	return pooled("notifications that their sender heard did not reach an idle client connection that had LISTENed on backend %d", x.pid)
}

// refused says why a command of step 4 failed.
func refused(command string, err error) error {
	if _, ok := errors.AsType[*finding](err); ok {
		return err
	}
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch refusal.Code {
		case "25006": // read_only_sql_transaction: "cannot execute LISTEN during recovery"
			return fmt.Errorf("%s is refused on a standby", command)
		case "55P03": // lock_not_available
			return fmt.Errorf("%s waits for a lock of another session's", command)
		}
	}
	return fmt.Errorf("%s: %w", command, err)
}

// unlisten takes back what step 4 left on backends. Where they are C's and B's own
// that is one question each. Behind a pooler it is as many as it takes to meet them
// again, within bounds.
func (p *probe) unlisten(channel string, listening map[backend]bool) {
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))
	conns := []*conn{p.c, p.b}
	for range stepsTrips {
		if len(listening) == 0 || len(conns) == 0 {
			return
		}
		c := conns[0]
		conns = conns[1:]
		if _, err := p.question(c, "UNLISTEN "+channel+"; "+whoAmI); answered(err) {
			delete(listening, c.backend)
			conns = append(conns, c)
		}
	}
}

// answered says whether a question was answered, if only by an unexpected backend.
func answered(err error) bool {
	_, moved := errors.AsType[*finding](err)
	return moved || err == nil
}

// refusesTransactions tells statement pooling from transaction pooling, once it is
// proven to be one of them. The ROLLBACK goes out with the BEGIN, so that nothing
// stays open whatever happens.
func (p *probe) refusesTransactions() bool {
	p.trips++
	until := time.Now().Add(p.patience(stepsFloor, stepsTrips))
	if err := p.c.ask(until, &pgproto3.Query{String: "BEGIN"}, &pgproto3.Query{String: "ROLLBACK"}); err != nil {
		return false
	}
	_, err := p.c.await(until)
	refusal, ok := errors.AsType[*pgconn.PgError](err)
	return ok && strings.Contains(refusal.Message, "transaction blocks not allowed") // PgBouncer's words, which nothing translates
}

// nonce is a word that nobody else uses: an identifier that needs no quotes, and a
// string that needs no escapes.
func nonce() string { return "pgadvlock_" + strings.ToLower(rand.Text()) }
