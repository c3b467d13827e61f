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
// There are two connections, C and B. To convict, the same backend must have
// served both, or C must have been moved from one backend to another, or somebody
// else must have used C's backend; to acquit, the idle C must have heard what only
// its backend could tell it.

// Patience. A wait is measured by the round trip: what is ample on a loopback is
// nothing across an ocean, or in the queue of a busy pool.
const (
	stepsFloor, stepsTrips     = 250 * time.Millisecond, 25 // for the questions of steps 1 to 3 together, and again of step 4
	connectFloor, connectTrips = time.Second, 25            // for each connect: TLS, SCRAM or an auth_query say nothing of the pool
	queueFloor, queueTrips     = 80 * time.Millisecond, 4   // until a question counts as queued
	rounds                     = 3                          // of step 3
	firstWindow, secondWindow  = 100 * time.Millisecond, 500 * time.Millisecond
)

// Probe finds out the pool mode by experiments on two connections made by dial,
// which must lead where the connection of first does, with the same user and
// database. It takes them over from pgconn, and closes them before it returns.
//
// It never fails: what cannot be proven is [Unknown], with the reason as evidence.
// When ctx ends it returns at once. Otherwise it takes at most 250 ms or 25 round
// trips for telling poolers that share backends, as much again and 600 ms more
// for telling one that does not, and a second or 25 round trips for each connect.
// No goroutine of its own outlives it.
//
// Behind transaction and statement pooling it may leave a backend listening to
// a channel that nobody else knows the name of, if that backend does not come
// its way again.
func Probe(ctx context.Context, first First, dial func(context.Context) (*pgconn.PgConn, error)) Verdict {
	if first.Direct {
		return Verdict{Mode: Direct, Evidence: fmt.Sprintf("backend %d greeted the connection and sees its port", first.BackendPID)}
	}
	p := &probe{ctx: ctx, dial: dial, roundTrip: first.RoundTrip, listening: make(map[backend]bool)}
	defer p.close()
	err := p.experiment(first)
	mode := Unknown
	var f *finding
	switch {
	case ctx.Err() != nil:
		err = ctx.Err() // whatever came of it
	case errors.As(err, &f):
		mode = f.mode
		if mode == Transaction && p.refusesTransactions() {
			mode = Statement
		}
	}
	return Verdict{Mode: mode, Evidence: err.Error(), RoundTrips: p.trips}
}

// probe is one run of Probe.
type probe struct {
	ctx       context.Context
	dial      func(context.Context) (*pgconn.PgConn, error)
	b, c      *conn
	roundTrip time.Duration
	deadline  time.Time // of the questions
	trips     int
	channel   string           // of step 4
	listening map[backend]bool // to it
}

// backend is one process of one server. Its pid alone is not: two servers behind
// one address may use the same number.
type backend struct {
	pid     uint32
	start   string
	server  string // the postmaster's start
	channel string // the database: notifications stay inside
}

func (b backend) String() string { return fmt.Sprintf("backend %d", b.pid) }

// together says whether the two could notify each other.
func (b backend) together(other backend) bool {
	return b.server == other.server && b.channel == other.channel
}

// finding is a proof, and ends the experiments as an error would.
type finding struct {
	mode     Mode
	evidence string
}

func (f *finding) Error() string { return f.evidence }

// pooled is the finding that a client is not alone with its backend. Whether it
// is between transactions or statements, nobody knows at that point.
func pooled(format string, args ...any) error {
	return &finding{Transaction, fmt.Sprintf(format, args...)}
}

func (p *probe) patience(floor time.Duration, trips int) time.Duration {
	return max(floor, time.Duration(trips)*p.roundTrip)
}

// experiment runs the steps until one of them finds something. It always returns an error.
func (p *probe) experiment(first First) (err error) {
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))
	if p.c, err = p.connect(); err != nil {
		return err
	}
	if err := p.renamed(); err != nil {
		return err
	}
	if p.b, err = p.connect(); err != nil {
		return err
	}
	if err := p.shared(); err != nil {
		return err
	}
	// One pid may agree by chance, where a pooler's numbers are a counter. Three
	// that agree, on connections that share nothing, are the backends' own.
	if first.SamePID && p.c.greeting == p.c.backend.pid && p.b.greeting == p.b.backend.pid {
		return &finding{Direct, fmt.Sprintf("three connections were greeted by the backends that serve them (%d, %d, %d), through a proxy or NAT that passes everything on",
			first.BackendPID, p.c.backend.pid, p.b.backend.pid)}
	}
	return p.pinned()
}

// connect makes one of the two connections. The time it takes is not the questions'.
func (p *probe) connect() (*conn, error) {
	begin := time.Now()
	ctx, cancel := context.WithTimeout(p.ctx, p.patience(connectFloor, connectTrips))
	defer cancel()
	p.trips++
	pg, err := p.dial(ctx)
	if err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) {
			err = refusal(pgErr)
		}
		return nil, fmt.Errorf("a connection of the probe's own was not to be had: %w", err)
	}
	p.deadline = p.deadline.Add(time.Since(begin))
	return take(p.ctx, pg)
}

// refusal is the server's error in a few words: there is no place for its hint and position.
func refusal(err *pgconn.PgError) error {
	return fmt.Errorf("%s (SQLSTATE %s)", err.Message, err.Code)
}

func (p *probe) close() {
	for _, c := range []*conn{p.b, p.c} {
		if c != nil {
			c.close()
		}
	}
}

// The first columns of every answer say who gives it. The times are in the
// binary form, which no setting of the session changes: backends of one pool may
// differ in TimeZone and DateStyle.
const (
	whoColumns = "pg_catalog.pg_backend_pid()" +
		", pg_catalog.encode(pg_catalog.timestamptz_send(s.backend_start), 'hex')" +
		", pg_catalog.encode(pg_catalog.timestamptz_send(pg_catalog.pg_postmaster_start_time()), 'hex')" +
		", pg_catalog.current_database()"
	whoFrom = " FROM pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid()) AS s"
	whoAmI  = "SELECT " + whoColumns + whoFrom
)

// meet reads who answered, and splits that off.
func meet(row []string) (backend, []string, error) {
	if len(row) < 4 {
		return backend{}, nil, errors.New("the answer is not what was asked for")
	}
	pid, err := parsePID(row[0])
	return backend{pid: pid, start: row[1], server: row[2], channel: row[3]}, row[4:], err
}

// question asks c, and returns what follows the first columns of the answer.
func (p *probe) question(c *conn, sql string) ([]string, error) {
	p.trips++
	if err := c.ask(sql, p.deadline); err != nil {
		return nil, err
	}
	return p.reply(c, p.deadline)
}

// reply waits for the answer to the question on its way. That another backend
// gives it than before is a finding, if both are of the same server: a proxy that
// spreads statements over several servers can still leave a client one backend on each.
func (p *probe) reply(c *conn, until time.Time) ([]string, error) {
	row, err := c.await(until)
	if err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) {
			return nil, fmt.Errorf("%w", err)
		}
		return nil, err
	}
	now, rest, err := meet(row)
	if err != nil {
		return nil, err
	}
	before := c.backend
	c.backend = now
	if before != (backend{}) && before != now && before.server == now.server {
		return nil, pooled("one client connection was moved from backend %d to %d", before.pid, now.pid)
	}
	return rest, nil
}

// renamed is step 2: a pooler that multiplexes prepared statements must give them
// names of its own on the backend. PgBouncer does since 1.21 (max_prepared_statements,
// on by default since 1.24), in transaction and statement mode only.
//
// It is also C's first question, and so the measure of what one costs through the pool.
func (p *probe) renamed() error {
	// The text is the same each time: PgBouncer keeps what a client closed for the
	// next one with the same text, up to its limit on each backend.
	const statement = "SELECT 1 AS pgadvlock_probe"
	const lookup = "SELECT " + whoColumns +
		", (SELECT pg_catalog.string_agg(p.name, ' ') FROM pg_catalog.pg_prepared_statements AS p WHERE p.statement OPERATOR(pg_catalog.=) '" + statement + "')" +
		whoFrom
	name := nonce()
	begin := time.Now()
	p.trips++
	err := p.c.send(p.deadline,
		&pgproto3.Parse{Name: name, Query: statement},
		&pgproto3.Parse{Query: lookup},
		&pgproto3.Bind{},
		&pgproto3.Execute{},
		&pgproto3.Close{ObjectType: 'S', Name: name},
		&pgproto3.Sync{})
	if err != nil {
		return err
	}
	rest, err := p.reply(p.c, p.deadline)
	if errors.Is(err, errSilent) {
		return errors.New("a second connection was greeted but got no answer: its pool has no backend free, or the server hangs")
	}
	if err != nil {
		return err
	}
	if took := time.Since(begin); took > p.roundTrip {
		p.deadline = p.deadline.Add(-p.patience(stepsFloor, stepsTrips))
		p.roundTrip = took
		p.deadline = p.deadline.Add(p.patience(stepsFloor, stepsTrips))
	}
	names := strings.Fields(rest[0])
	if slices.Contains(names, name) {
		return nil
	}
	for _, other := range names {
		if strings.HasPrefix(other, "PGBOUNCER_") {
			return pooled("a prepared statement was renamed to %s", other)
		}
	}
	return nil
}

// shared is step 3: does a backend serve more than one client?
func (p *probe) shared() error {
	for round := range rounds {
		err := p.round()
		if errors.Is(err, errSilent) {
			if round > 0 {
				return nil // step 4 has time of its own
			}
			return errors.New("neither of two connections was answered in time: the pool or the server is too busy")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// round lets C leave a mark on its backend, and B look whether it is still there.
// Two questions of C's follow each other, in step 2 and here: a pool that hands out
// its backends in turn would give B and C one each for ever, if only they alternated.
func (p *probe) round() error {
	mark := nonce()
	// The mark is at the beginning: the backend keeps track_activity_query_size bytes, at least 100.
	// A literal, not a comment: proxies strip those. C looks itself whether it can
	// be seen, for track_activities may be off, or the text rewritten.
	leave := "SELECT " + whoColumns + ", pg_catalog.strpos(s.query, '" + mark + "')" + whoFrom
	leave = "SELECT '" + mark + "' AS mark; " + leave
	seen, err := p.question(p.c, leave)
	if err != nil {
		return err
	}
	x := p.c.backend

	look := fmt.Sprintf("SELECT %s, x.state, pg_catalog.strpos(x.query, '%s')%s LEFT JOIN pg_catalog.pg_stat_get_activity(%d) AS x ON true",
		whoColumns, mark, whoFrom, int32(x.pid))
	p.trips++
	if err := p.b.ask(look, p.deadline); err != nil {
		return err
	}
	found, err := p.reply(p.b, earlier(p.deadline, time.Now().Add(p.patience(queueFloor, queueTrips))))
	if errors.Is(err, errSilent) {
		// Whoever shares a pool waits in the order of arrival: C's answer cannot
		// overtake B's. C leaves the same mark as before, so that B, whenever it is
		// served, finds it.
		if _, err := p.question(p.c, leave); err != nil {
			return err
		}
		found, err = p.reply(p.b, time.Now().Add(p.roundTrip+10*time.Millisecond))
		if errors.Is(err, errSilent) {
			return errors.New("the pool has no second connection free: one connection is answered while another waits")
		}
	}
	if err != nil {
		return err
	}
	y := p.b.backend
	switch {
	case y == x:
		return pooled("two client connections were given backend %d", x.pid)
	case y.server != x.server:
		return nil // what Y's server knows of a process with X's number is no evidence
	case seen[0] != "0" && seen[0] != "" && found[0] != "" && found[0] != "disabled" && found[1] == "0":
		return pooled("backend %d ran a statement of somebody else's while its client was idle", x.pid)
	}
	return nil
}

// pinned is step 4, and the only one that can find session pooling: C listens and
// is idle, B notifies. Only the backend that listens hears it, and only a pooler
// that has left it to C passes it on.
func (p *probe) pinned() error {
	p.channel = nonce()
	defer p.unlisten()
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))

	if _, err := p.question(p.c, "LISTEN "+p.channel+"; "+whoAmI); err != nil {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && pgErr.Code == "25006" { // read_only_sql_transaction
			return errors.New("no proof of session pooling: LISTEN is refused on a standby")
		}
		return fmt.Errorf("no proof of session pooling: LISTEN: %w", err)
	}
	x := p.c.backend
	p.listening[x] = true

	late := false
	for _, window := range []time.Duration{firstWindow, secondWindow} {
		p.c.heard, p.b.heard = nil, nil
		// A commit with a NOTIFY takes a lock that is one for the whole cluster. lock_timeout
		// bounds that wait on the server: closing the socket would not end it.
		if _, err := p.question(p.b, "SELECT pg_catalog.set_config('lock_timeout', '200ms', true); "+
			"LISTEN "+p.channel+"; NOTIFY "+p.channel+"; "+whoAmI); err != nil {
			return fmt.Errorf("no proof of session pooling: NOTIFY: %w", err)
		}
		y := p.b.backend
		p.listening[y] = true
		if y == x {
			return pooled("two client connections were given backend %d", x.pid)
		}
		if !y.together(x) {
			return errors.New("no proof of session pooling: two connections lead to different servers or databases")
		}
		if n, err := p.b.hear(p.channel, time.Now().Add(firstWindow)); err != nil || n.pid != y.pid {
			return errors.New("no proof of session pooling: a notification did not come back to its sender")
		}

		n, err := p.c.hear(p.channel, time.Now().Add(window))
		p.deadline = p.deadline.Add(window)
		if err != nil && !errors.Is(err, errSilent) {
			return err
		}
		heard := err == nil
		listens, err := p.question(p.c, "SELECT "+whoColumns+
			", (SELECT pg_catalog.count(*) FROM pg_catalog.pg_listening_channels() AS l(name) WHERE l.name OPERATOR(pg_catalog.=) '"+p.channel+"')"+whoFrom)
		if err != nil {
			return err
		}
		switch {
		case heard && p.c.backend != x:
			return errors.New("no proof of session pooling: two servers answer one connection")
		case heard && n.pid != y.pid:
			return fmt.Errorf("no proof of session pooling: a notification of backend %d came in the name of %d", y.pid, n.pid)
		case heard && listens[0] != "1":
			return errors.New("no proof of session pooling: LISTEN is answered by a proxy, not by the backend")
		case heard:
			return &finding{Session, fmt.Sprintf("a notification from backend %d reached an idle client connection on backend %d", y.pid, x.pid)}
		case len(p.c.heard) > 0:
			late = true
		}
	}
	if late {
		return errors.New("no proof of session pooling: a notification did not reach the idle connection, but came with an answer")
	}
	return pooled("notifications, heard by their sender, did not reach an idle connection that had LISTENed on backend %d", x.pid)
}

// unlisten takes back what step 4 left on backends. Where they are C's and B's own
// that is one question each; behind a pooler, as many as it takes to meet them
// again, or until the time is up.
func (p *probe) unlisten() {
	p.deadline = time.Now().Add(p.patience(stepsFloor, stepsTrips))
	for i := 0; len(p.listening) > 0; i++ {
		c := []*conn{p.c, p.b}[i%2]
		if _, err := p.question(c, "UNLISTEN "+p.channel+"; "+whoAmI); err != nil && !errors.As(err, new(*finding)) {
			return
		}
		delete(p.listening, c.backend)
	}
}

// refusesTransactions tells statement pooling from transaction pooling, once it
// is proven to be one of them. ROLLBACK is sent along with BEGIN, so that nothing
// stays open whatever happens.
func (p *probe) refusesTransactions() bool {
	if p.c.waiting {
		return false
	}
	until := time.Now().Add(p.patience(stepsFloor, stepsTrips))
	p.trips++
	if err := p.c.send(until, &pgproto3.Query{String: "BEGIN"}, &pgproto3.Query{String: "ROLLBACK"}); err != nil {
		return false
	}
	_, err := p.c.await(until)
	return err != nil && strings.Contains(err.Error(), "transaction blocks not allowed")
}

// nonce is a word that nobody else uses: an identifier that needs no quotes, and
// a string that needs no escapes.
func nonce() string { return "pgadvlock_" + strings.ToLower(rand.Text()) }

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
