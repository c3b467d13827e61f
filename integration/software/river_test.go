package software

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverdatabasesql"
	"github.com/riverqueue/river/rivermigrate"
)

type sortArgs struct {
	Strings []string `json:"strings"`
}

func (sortArgs) Kind() string { return "sort" }

type sortWorker struct {
	river.WorkerDefaults[sortArgs]
	done chan []string
}

func (w *sortWorker) Work(_ context.Context, job *river.Job[sortArgs]) error {
	w.done <- job.Args.Strings
	return nil
}

func TestRiver(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		ctx := t.Context()
		pool := p.open(t)
		driver := riverdatabasesql.New(pool)
		migrator, err := rivermigrate.New(driver, nil)
		must(t, err)
		_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
		must(t, err)

		worker := &sortWorker{done: make(chan []string, 10)}
		workers := river.NewWorkers()
		river.AddWorker(workers, worker)
		client, err := river.NewClient(driver, &river.Config{
			Logger:            slog.New(slog.DiscardHandler),
			Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
			FetchPollInterval: 50 * time.Millisecond, FetchCooldown: 20 * time.Millisecond,
			Workers: workers, PollOnly: true, TestOnly: true,
		})
		must(t, err)
		must(t, client.Start(ctx))
		tx, err := pool.BeginTx(ctx, nil)
		must(t, err)
		_, err = tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(42)")
		must(t, err)
		_, err = client.InsertTx(ctx, tx, sortArgs{[]string{"whale", "tiger"}}, &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}})
		must(t, err)
		must(t, tx.Commit())
		_, err = client.Insert(ctx, sortArgs{[]string{"bear"}}, nil)
		must(t, err)
		for range 2 {
			select {
			case <-worker.done:
			case <-time.After(20 * time.Second):
				t.Fatal("the job does not run")
			}
		}
		stop, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		must(t, client.Stop(stop))
		p.nothingHeld(t)
		silent(t)
		// The executor's own way to lock, which is a transaction lock.
		_, err = driver.GetExecutor().PGAdvisoryXactLock(ctx, 42)
		must(t, err)
		if got := rules(log.take()); len(got) != 1 || got[0] != "xact-lock-autocommit" {
			t.Errorf("outside a transaction it is told off: %v", got)
		}
	})
}
