package main

// This file owns Jaeger's query API, as its own pages use it: /api/traces.

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// traceData is one trace.
type traceData struct {
	TraceID   string
	Spans     []*span
	Processes map[string]struct {
		ServiceName string
		Tags        tags
	}
}

type span struct {
	SpanID        string
	OperationName string
	References    []reference
	StartTime     int64 // microseconds since 1970
	Duration      int64 // microseconds
	Tags          tags
	Logs          []event
	ProcessID     string
}

// reference is to the parent, CHILD_OF, or a link, FOLLOWS_FROM.
type reference struct{ RefType, TraceID, SpanID string }

// event is what OpenTelemetry calls a span event.
type event struct {
	Timestamp int64 // microseconds since 1970
	Fields    tags
}

type tags []struct {
	Key   string
	Value any
}

// text returns a tag's value, "" when there is none.
func (t tags) text(key string) string {
	for _, tag := range t {
		if tag.Key == key {
			return fmt.Sprint(tag.Value)
		}
	}
	return ""
}

// list returns the values of a tag that was an array, which Jaeger keeps as
// JSON.
func (t tags) list(key string) []string {
	var values []any
	if err := json.Unmarshal([]byte(t.text(key)), &values); err != nil {
		return nil
	}
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = fmt.Sprint(v)
	}
	return texts
}

func (s *span) duration() time.Duration { return time.Duration(s.Duration) * time.Microsecond }

// parent returns the id of the parent, "" when the span is a root.
func (s *span) parent() string {
	for _, r := range s.References {
		if r.RefType == "CHILD_OF" {
			return r.SpanID
		}
	}
	return ""
}

func (s *span) links() (links []reference) {
	for _, r := range s.References {
		if r.RefType == "FOLLOWS_FROM" {
			links = append(links, r)
		}
	}
	return links
}

func (e event) name() string { return e.Fields.text("event") }

// instance is the pod that a span comes from.
func (t *traceData) instance(s *span) string {
	return t.Processes[s.ProcessID].Tags.text("service.instance.id")
}

// root returns the span that no other one of the trace is the parent of.
func (t *traceData) root() *span {
	for _, s := range t.Spans {
		if s.parent() == "" {
			return s
		}
	}
	return t.Spans[0]
}

// search is the query for the traces of a service that have a span with these
// tags, "name=value".
func search(service string, having ...string) string {
	wanted := map[string]string{}
	for _, tag := range having {
		name, value, _ := strings.Cut(tag, "=")
		wanted[name] = value
	}
	q := url.Values{"service": {service}, "limit": {"1000"}}
	if len(wanted) > 0 {
		text, _ := json.Marshal(wanted) // strings
		q.Set("tags", string(text))
	}
	return q.Encode()
}

// find returns what a search finds, the oldest first.
func (j *jaeger) find(ctx context.Context, query string) ([]*traceData, error) {
	var found struct{ Data []*traceData }
	if err := get(ctx, j.query+"/api/traces?"+query, &found); err != nil {
		return nil, err
	}
	slices.SortFunc(found.Data, func(a, b *traceData) int { return int(a.root().StartTime - b.root().StartTime) })
	for _, t := range found.Data {
		slices.SortStableFunc(t.Spans, func(a, b *span) int { return int(a.StartTime - b.StartTime) })
	}
	return found.Data, nil
}

// await repeats a search until done says that it has found what was sent, which
// shows some 25 to 200 ms after it was sent.
func (j *jaeger) await(ctx context.Context, query string, done func([]*traceData) bool) ([]*traceData, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		found, err := j.find(ctx, query)
		if err == nil && done(found) {
			return found, nil
		}
		select {
		case <-j.ended:
			return nil, fmt.Errorf("jaeger has ended:\n%s", j.log)
		case <-ctx.Done():
			if err == nil {
				err = fmt.Errorf("jaeger shows %d traces for %s, and not those that were sent", len(found), query)
			}
			return nil, err
		case <-time.After(25 * time.Millisecond):
		}
	}
}
