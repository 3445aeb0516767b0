package gpu

import (
	"context"
	"sync"
	"time"
)

// Remember fills a metric that cannot be read now with its last good value, marked Stale and with the time it was read at,
// for as long as keep; after that it is Missing. What a device never supported stays Unsupported.
func Remember(src Source, keep time.Duration, now func() time.Time) Source {
	return &remembering{Source: src, keep: keep, now: now, good: map[string]Sample{}}
}

type remembering struct {
	Source
	keep time.Duration
	now  func() time.Time

	mu   sync.Mutex
	good map[string]Sample // by UUID: the last good value of each metric
}

func (r *remembering) Sample(ctx context.Context) ([]Sample, error) {
	samples, err := r.Source.Sample(ctx)
	if err != nil {
		return nil, err
	}
	now := r.now()
	r.mu.Lock()
	defer r.mu.Unlock()
	present := make(map[string]Sample, len(samples))
	for i := range samples {
		s := &samples[i]
		good := r.good[s.UUID]
		r.merge(&s.UtilisationPct, &good.UtilisationPct, now)
		r.merge(&s.MemoryUsedMiB, &good.MemoryUsedMiB, now)
		r.merge(&s.PowerW, &good.PowerW, now)
		r.merge(&s.TemperatureC, &good.TemperatureC, now)
		r.mergeProcesses(s, &good, now)
		present[s.UUID] = good
	}
	r.good = present
	return samples, nil
}

func (r *remembering) merge(m, good *Metric, now time.Time) {
	switch {
	case m.State == Fresh:
		*good = *m
	case m.State == Missing && good.State == Fresh && now.Sub(good.At) <= r.keep:
		*m = Metric{Value: good.Value, State: Stale, At: good.At, Reason: m.Reason}
	}
}

func (r *remembering) mergeProcesses(s, good *Sample, now time.Time) {
	switch {
	case s.ProcessesState == Fresh:
		good.Processes, good.ProcessesState, good.At = s.Processes, Fresh, s.At
	case s.ProcessesState == Missing && good.ProcessesState == Fresh && now.Sub(good.At) <= r.keep:
		s.Processes, s.ProcessesState = good.Processes, Stale
	}
}
