package poolmode

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// This file owns one of the probe's connections: messages out, answers and
// notifications in, each wait with an end. It knows nothing of what they mean.
//
// It takes the socket over from pgconn, because pgconn can neither leave a
// question unanswered and come back to it later, as a wait in a pooler's queue
// demands, nor give one up without a goroutine that may live for 15 seconds more.

// conn is a connection of the probe's own. It belongs to one goroutine.
type conn struct {
	socket   net.Conn
	frontend *pgproto3.Frontend
	greeting uint32  // the pid that the server's greeting named
	backend  backend // who answered last

	expected int    // how many ReadyForQuery are to come: 0 when no question is on its way
	answer   answer // as far as it is here
	heard    []notification

	unwatch func() // ctx
}

// answer is what came back for a question.
type answer struct {
	row []string // the last one; null is ""
	err *pgconn.PgError
}

type notification struct {
	pid     uint32 // of the backend that sent it
	channel string
}

// errSilent means that the answer is not here in time, but may still come.
var errSilent = errors.New("no answer in time")

// take makes a connection the probe's own. When ctx ends, its socket is closed
// under whoever waits.
func take(ctx context.Context, pg *pgconn.PgConn) (*conn, error) {
	hijacked, err := pg.Hijack()
	if err != nil {
		pg.Close(ctx)
		return nil, err
	}
	socket := hijacked.Conn
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		socket.Close()
		close(closed)
	})
	unwatch := func() {
		if !stop() {
			<-closed // no goroutine of the probe's may outlive it
		}
	}
	return &conn{socket: socket, frontend: hijacked.Frontend, greeting: hijacked.PID, unwatch: unwatch}, nil
}

// close ends the connection, with a good-bye if the other end listens. A question
// that still waits in a pooler's queue ends with its socket.
func (c *conn) close() {
	c.unwatch()
	if !c.waiting() {
		c.socket.SetDeadline(time.Now().Add(100 * time.Millisecond))
		c.frontend.Send(&pgproto3.Terminate{})
		c.frontend.Flush()
	}
	c.socket.Close()
}

// waiting says whether a question is on its way.
func (c *conn) waiting() bool { return c.expected > 0 }

// ask sends questions, all at once. Each Query and each Sync is to be answered
// with a ReadyForQuery.
func (c *conn) ask(until time.Time, messages ...pgproto3.FrontendMessage) error {
	if c.waiting() {
		return errors.New("the connection is busy with the last question")
	}
	c.answer = answer{}
	for _, m := range messages {
		switch m.(type) {
		case *pgproto3.Query, *pgproto3.Sync:
			c.expected++
		}
		c.frontend.Send(m)
	}
	if err := c.socket.SetDeadline(until); err != nil {
		return broken(err)
	}
	if err := c.frontend.Flush(); err != nil {
		return broken(err)
	}
	return nil
}

// await waits until then for the answer to the question on its way: [errSilent]
// if it is not complete, to be awaited again or not, and a [*pgconn.PgError] if the server
// refuses. The answer is the last row.
func (c *conn) await(until time.Time) ([]string, error) {
	if err := c.socket.SetDeadline(until); err != nil {
		return nil, broken(err)
	}
	for c.waiting() {
		err := c.receive()
		if err != nil && c.answer.err != nil && !errors.Is(err, errSilent) {
			return nil, c.answer.err // what was said before the connection was closed
		}
		if err != nil {
			return nil, err
		}
	}
	if c.answer.err != nil {
		return nil, c.answer.err
	}
	return c.answer.row, nil
}

// hear waits until then for a notification on the channel: [errSilent] if there is none.
func (c *conn) hear(channel string, until time.Time) (notification, error) {
	if err := c.socket.SetDeadline(until); err != nil {
		return notification{}, broken(err)
	}
	for {
		i := slices.IndexFunc(c.heard, func(n notification) bool { return n.channel == channel })
		if i >= 0 {
			return c.heard[i], nil
		}
		if err := c.receive(); err != nil {
			return notification{}, err
		}
	}
}

// receive takes in one message. A deadline may pass in the middle of one: what is
// there of it waits for the next call.
func (c *conn) receive() error {
	message, err := c.frontend.Receive()
	if err != nil {
		return broken(err)
	}
	switch m := message.(type) {
	case *pgproto3.DataRow:
		c.answer.row = make([]string, len(m.Values))
		for i, v := range m.Values {
			c.answer.row[i] = string(v)
		}
	case *pgproto3.ErrorResponse:
		if c.answer.err == nil {
			c.answer.err = pgconn.ErrorResponseToPgError(m)
		}
	case *pgproto3.NotificationResponse:
		c.heard = append(c.heard, notification{pid: m.PID, channel: m.Channel})
	case *pgproto3.ReadyForQuery:
		c.expected = max(0, c.expected-1)
	}
	return nil
}

// broken tells an end of patience from an end of the connection.
func broken(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return errSilent
	}
	return fmt.Errorf("the connection broke: %w", err)
}
