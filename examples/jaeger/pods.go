package main

// This file owns what the pods do: jobs as people write them, with the mistakes
// that people make. All it needs of its surroundings is a database and the
// standard OTEL_ variables.

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"path/filepath"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pgadvlock/pgadvlock"
)

// podNames are the replicas, as a StatefulSet names them.
var podNames = []string{"worker-0", "worker-1", "worker-2"}

// waited is how many seconds a job waited for a lock, by its own clock: what
// the driver's span should say too.
const waited = attribute.Key("worker.waited")

// database is where the pods' locks are.
type database struct {
	dsn    string
	pooled string // the same through a pooler in transaction mode; "" when there is none
}

// pod is one replica of the worker, with pools and a tracer of its own.
type pod struct {
	name     string
	db       *sql.DB
	pooled   *sql.DB // nil when there is no pooler
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	log      *slog.Logger
}

// startPod connects a pod. Where its spans go, and how, is what
// OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_PROTOCOL
// and their like say; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say whose
// they are.
func startPod(ctx context.Context, to database, name string) (*pod, error) {
	exporter, err := autoexport.NewSpanExporter(ctx)
	if err != nil {
		return nil, err
	}
	whose, err := resource.New(ctx,
		resource.WithAttributes(semconv.ServiceName(service), semconv.ServiceInstanceID(name)),
		resource.WithFromEnv(), resource.WithTelemetrySDK())
	if err != nil {
		return nil, err
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(whose))
	p := &pod{name: name, provider: provider, tracer: provider.Tracer("worker"), log: slog.With("pod", name)}
	if p.db, err = p.open(to.dsn); err == nil && to.pooled != "" {
		p.pooled, err = p.open(to.pooled)
	}
	return p, err
}

// open opens a database, with the pod's name as the application_name, by which
// other pods' spans name the holder of a lock.
func (p *pod) open(dsn string) (*sql.DB, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, errors.New("the DSN is not a URL") // the error has the password in it
	}
	q := u.Query()
	q.Set("application_name", p.name)
	u.RawQuery = q.Encode()
	connector, err := pgadvlock.NewConnector(u.String(),
		pgadvlock.WithTracerProvider(p.provider),
		pgadvlock.WithLogger(p.log),
		pgadvlock.WithBlockerAfter(300*time.Millisecond))
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

// stop sends what spans there are.
func (p *pod) stop() error {
	err := p.db.Close() // ends the spans of what it held
	if p.pooled != nil {
		err = errors.Join(err, p.pooled.Close())
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(err, p.provider.Shutdown(ctx))
}

// runPods starts pods and waits until each has done its jobs. The error is what
// went wrong beyond what the jobs are there to show.
func runPods(ctx context.Context, to database, names ...string) error {
	var all sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		all.Go(func() {
			p, err := startPod(ctx, to, name)
			if err == nil {
				err = errors.Join(p.run(ctx), p.stop())
			}
			if err != nil {
				errs[i] = fmt.Errorf("%s: %w", name, err)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// run does the pod's jobs, those of a step at the same time. Pods are replicas
// and could do each other's; here each has its part.
func (p *pod) run(ctx context.Context) error {
	if err := p.until(ctx, "all pods are there", `SELECT count(DISTINCT application_name) = 3 FROM pg_stat_activity
		WHERE datname = current_database() AND application_name LIKE 'worker-_'`); err != nil {
		return err
	}
	report := job{"nightly-report", p.nightlyReport}
	steps := map[string][][]job{
		"worker-0": {{report}, {{"rebuild", p.rebuild}}, {{"transfer", p.transfer(100, 200)}}, {{"invoice", p.invoice}}},
		"worker-1": {{report}, {{"refund", p.refund}}, {{"pay", p.pay}, {"pay", p.payToo}}, {{"transfer", p.transfer(200, 100)}}},
		"worker-2": {{report}, {{"refund", p.impatientRefund}}, {{"import", p.importFiles}}},
	}
	if p.pooled != nil {
		steps["worker-2"] = append(steps["worker-2"], []job{{"sync", p.sync}})
	}
	var errs []error
	for _, step := range steps[p.name] {
		var all sync.WaitGroup
		failed := make([]error, len(step))
		for i, j := range step {
			all.Go(func() {
				if err := p.do(ctx, j); !meant(err) {
					failed[i] = fmt.Errorf("job %s: %w", j.name, err)
				}
			})
		}
		all.Wait()
		errs = append(errs, failed...)
	}
	return errors.Join(errs...)
}

type job struct {
	name string
	run  func(context.Context) error
}

// do runs a job in a trace of its own.
func (p *pod) do(ctx context.Context, j job) error {
	ctx, span := p.tracer.Start(ctx, "job "+j.name)
	defer span.End()
	err := j.run(ctx)
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		p.log.InfoContext(ctx, "job "+j.name+" failed", "error", err)
	}
	return err
}

const (
	lockNotAvailable = "55P03" // lock_timeout
	deadlockDetected = "40P01"
)

// meant says whether a job ended as it is here to show.
func meant(err error) bool {
	var pg *pgconn.PgError
	return err == nil || errors.Is(err, pgadvlock.RulePooledSessionLock) || errors.Is(err, pgadvlock.RuleTransactionPooling) ||
		errors.As(err, &pg) && (pg.Code == lockNotAvailable || pg.Code == deadlockDetected)
}

// nightlyReport is on every pod's calendar; whoever gets the key does it.
func (p *pod) nightlyReport(ctx context.Context) error {
	return p.onConn(ctx, func(conn *sql.Conn) error {
		var mine bool
		err := conn.QueryRowContext(ctx, "SELECT pg_try_advisory_lock(hashtextextended('nightly-report', 0))").Scan(&mine)
		if err != nil || !mine {
			return err
		}
		work(ctx, time.Second)
		_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock(hashtextextended('nightly-report', 0))")
		return err
	})
}

// Table 1 is the customers; keys are (table, customer).
const (
	customers = 1
	customer  = 9527
)

// rebuild is the slow job that others wait for.
func (p *pod) rebuild(ctx context.Context) error {
	return p.onConn(ctx, func(conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock($1, $2)", customers, customer); err != nil {
			return err
		}
		work(ctx, 3*time.Second)
		_, err := conn.ExecContext(ctx, "SELECT pg_advisory_unlock($1, $2)", customers, customer)
		return err
	})
}

// refund waits for the slow job on another pod.
func (p *pod) refund(ctx context.Context) error {
	return p.onConn(ctx, func(conn *sql.Conn) error {
		if err := p.untilTaken(ctx, customer); err != nil {
			return err
		}
		began := time.Now()
		_, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock($1, $2)", customers, customer)
		note(ctx, began)
		if err != nil {
			return err
		}
		work(ctx, 50*time.Millisecond)
		_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock($1, $2)", customers, customer)
		return err
	})
}

// impatientRefund waits for it too, but for a second only.
func (p *pod) impatientRefund(ctx context.Context) error {
	return p.inTx(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "SET LOCAL lock_timeout = '1s'"); err != nil {
			return err
		}
		if err := p.untilTaken(ctx, customer); err != nil {
			return err
		}
		began := time.Now()
		_, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1, $2)", customers, customer)
		note(ctx, began)
		return err
	})
}

const order = 4711

// pay is a request that takes its time.
func (p *pod) pay(ctx context.Context) error {
	return p.inTx(ctx, func(tx *sql.Tx) error {
		began := time.Now()
		_, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", order)
		note(ctx, began)
		if err != nil {
			return err
		}
		work(ctx, 1500*time.Millisecond)
		return nil
	})
}

// payToo is the same request once more, on the same pod: its wait is linked to
// what it waits for.
func (p *pod) payToo(ctx context.Context) error {
	if err := p.untilTaken(ctx, order); err != nil {
		return err
	}
	return p.pay(ctx)
}

// transfer locks two accounts, which another pod does in the other order.
func (p *pod) transfer(from, to int64) func(context.Context) error {
	return func(ctx context.Context) error {
		return p.inTx(ctx, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", from); err != nil {
				return err
			}
			if err := p.untilTaken(ctx, to); err != nil {
				return err
			}
			_, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", to)
			return err
		})
	}
}

const importKey = 77

// importFiles returns early, and forgets to unlock.
func (p *pod) importFiles(ctx context.Context) error {
	return p.onConn(ctx, func(conn *sql.Conn) error {
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock($1)", importKey); err != nil {
			return err
		}
		files, err := filepath.Glob("incoming/*.csv")
		if err != nil || len(files) == 0 {
			return err
		}
		_, err = conn.ExecContext(ctx, "SELECT pg_advisory_unlock($1)", importKey)
		return err
	})
}

// invoice locks through the pool, where the lock would guard nothing.
func (p *pod) invoice(ctx context.Context) error {
	_, err := p.db.ExecContext(ctx, "SELECT pg_advisory_lock($1)", 8)
	return err
}

// sync takes a connection of its own, as it should, but through a pooler that
// gives every transaction another backend.
func (p *pod) sync(ctx context.Context) error {
	conn, err := p.pooled.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.ExecContext(ctx, "SELECT pg_advisory_lock($1)", 9)
	return err
}

// note tells the job's span for how long it waited, since began. (A helper that
// sent the statement too would be the call site of all locks.)
func note(ctx context.Context, began time.Time) {
	trace.SpanFromContext(ctx).SetAttributes(waited.Float64(time.Since(began).Seconds()))
}

func (p *pod) onConn(ctx context.Context, do func(*sql.Conn) error) error {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return err
	}
	return errors.Join(do(conn), conn.Close())
}

func (p *pod) inTx(ctx context.Context, do func(*sql.Tx) error) error {
	tx, err := p.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// work is what the lock is for.
func work(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// untilTaken waits until somebody holds the key, so that the jobs meet.
func (p *pod) untilTaken(ctx context.Context, key int64) error {
	return p.until(ctx, fmt.Sprintf("somebody holds %d", key), fmt.Sprintf(`SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND objid = %d AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`, key))
}

// until waits, for at most a minute, until a question is answered with true.
func (p *pod) until(ctx context.Context, what, question string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		var yes bool
		if err := p.db.QueryRowContext(ctx, question).Scan(&yes); err != nil {
			return fmt.Errorf("waiting until %s: %w", what, err)
		}
		if yes {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}
