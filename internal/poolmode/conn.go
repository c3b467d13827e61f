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
// question unanswered and come back to it later, as a wait for a pooler's queue
// must, nor give one up without a goroutine that may live for 15 seconds more.

// conn is a connection of the probe's own. It belongs to one goroutine.
type conn struct {
	socket   net.Conn
	frontend *pgproto3.Frontend
	greeting uint32  // the pid that the server's greeting named
	backend  backend // who answered last

	waiting bool   // a question is on its way
	answer  answer // of it, as far as it is here
	ready   int    // how many ReadyForQuery are to come
	heard   []notification

	unwatch func()
}

// answer is what came back for one question.
type answer struct {
	row []string // the last one; null is ""
	err *pgconn.PgError
}

type notification struct {
	pid     uint32
	channel string
}

// errSilent means that the answer may still come.
var errSilent = errors.New("no answer in time")

// take makes c a connection of the probe's. When ctx ends, its socket is closed
// under whoever waits.
func take(ctx context.Context, c *pgconn.PgConn) (*conn, error) {
	hijacked, err := c.Hijack()
	if err != nil {
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
			<-closed // nothing of the probe's may outlive it
		}
	}
	return &conn{socket: socket, frontend: hijacked.Frontend, greeting: hijacked.PID, unwatch: unwatch}, nil
}

// close ends the connection, with a good-bye where the server is listening. A
// question that still waits in a pooler's queue dies with its socket.
func (c *conn) close() {
	c.unwatch()
	if !c.waiting {
		c.socket.SetDeadline(time.Now().Add(100 * time.Millisecond))
		c.frontend.Send(&pgproto3.Terminate{})
		c.frontend.Flush()
	}
	c.socket.Close()
}

// ask sends a question in the simple protocol, perhaps of several statements.
func (c *conn) ask(sql string, until time.Time) error {
	return c.send(until, &pgproto3.Query{String: sql})
}

// send sends messages to which the server answers with one ReadyForQuery for each Query or Sync.
func (c *conn) send(until time.Time, messages ...pgproto3.FrontendMessage) error {
	if c.waiting {
		return errors.New("a question is on its way already")
	}
	if err := c.socket.SetDeadline(until); err != nil {
		return err
	}
	c.waiting, c.answer, c.ready = true, answer{}, 0
	for _, m := range messages {
		switch m.(type) {
		case *pgproto3.Query, *pgproto3.Sync:
			c.ready++
		}
		c.frontend.Send(m)
	}
	return c.frontend.Flush()
}

// await waits for the answer to the question on its way: errSilent if it is not
// complete by then, to be awaited again or not. An error of the server's is a *pgconn.PgError.
func (c *conn) await(until time.Time) ([]string, error) {
	if err := c.socket.SetDeadline(until); err != nil {
		return nil, err
	}
	for c.waiting {
		if err := c.receive(); err != nil {
			if c.answer.err != nil && !errors.Is(err, errSilent) {
				return nil, c.answer.err // what it said before it hung up
			}
			return nil, err
		}
	}
	if c.answer.err != nil {
		return nil, c.answer.err
	}
	return c.answer.row, nil
}

// hear waits until then for a notification on the channel: errSilent if there is none.
func (c *conn) hear(channel string, until time.Time) (notification, error) {
	if err := c.socket.SetDeadline(until); err != nil {
		return notification{}, err
	}
	for {
		if i := slices.IndexFunc(c.heard, func(n notification) bool { return n.channel == channel }); i >= 0 {
			return c.heard[i], nil
		}
		if err := c.receive(); err != nil {
			return notification{}, err
		}
	}
}

// receive takes in one message.
func (c *conn) receive() error {
	message, err := c.frontend.Receive()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSilent
	case err != nil:
		return fmt.Errorf("the connection broke: %w", err)
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
		c.ready--
		c.waiting = c.ready > 0
	}
	return nil
}
