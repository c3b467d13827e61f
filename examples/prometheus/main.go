// Command prometheus is a small service that takes an advisory lock for each
// request, and shows Prometheus what the driver measures.
//
//	DATABASE_URL=postgres://... go run ./prometheus
//	curl -X POST localhost:2112/refund/9527
//	curl localhost:2112/metrics
//
// LISTEN is the address that it listens on, else localhost:2112.
package main

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgadvlock/pgadvlock"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "prometheus:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	s, err := newService(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer s.db.Close()
	server := &http.Server{Addr: cmp.Or(os.Getenv("LISTEN"), "localhost:2112"), Handler: s.handler()}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	fmt.Printf("http://%s/metrics\n", server.Addr)
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// service is the database and what is measured on it.
type service struct {
	db       *sql.DB
	registry *prometheus.Registry
}

// newService opens the database. These are the lines that a program needs: an
// exporter, a provider that it reads, and the driver told of the provider
// (or otel.SetMeterProvider, which the driver finds by itself).
func newService(dsn string, opts ...pgadvlock.Option) (*service, error) {
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return nil, err
	}
	provider := sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	connector, err := pgadvlock.NewConnector(dsn, append(opts, pgadvlock.WithMeterProvider(provider))...)
	if err != nil {
		return nil, err
	}
	return &service{sql.OpenDB(connector), registry}, nil
}

func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /refund/{customer}", func(w http.ResponseWriter, r *http.Request) {
		customer, err := strconv.ParseInt(r.PathValue("customer"), 10, 64)
		if err != nil {
			http.Error(w, "the customer is not a number", http.StatusBadRequest)
			return
		}
		if err := s.refund(r.Context(), customer); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	return mux
}

// refund lets one request at a time work on a customer.
func (s *service) refund(ctx context.Context, customer int64) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", customer); err != nil {
		return err
	}
	time.Sleep(100 * time.Millisecond) // the work
	return tx.Commit()
}
