package host

import (
	"context"
	"time"
)

// Bounds of one Observe call (DESIGN D9) and of one batch in it.
const (
	ObserveTime    = 10 * time.Second
	ObserveRecords = 1000
	batchRecords   = 100
)

// Batch is part of what Observe tells.
type Batch struct {
	Seq            int64 // it reaches this number
	Facts          *Facts
	Runs           []Observed
	Complete       bool // what was there at the call has all been told
	JournalID      string
	VolumesRemoved []string
}

// observation is one call of Observe.
type observation struct {
	host  *Host
	send  func(Batch) error
	after int64 // told up to here
	gone  int64 // volumes told up to here
	sent  int
	facts int64 // version of the facts that were told
}

// Observe tells facts, then all records newer than after, then changes, until wait is over, the records of one call are told,
// or ctx ends. after also acknowledges all up to it.
func (h *Host) Observe(ctx context.Context, after int64, wait time.Duration, send func(Batch) error) error {
	if wait <= 0 || wait > ObserveTime {
		wait = ObserveTime
	}
	top, _ := h.journal.Seq()
	if after > top {
		after = 0 // numbers of another journal
	}
	h.journal.Acknowledge(after, h.wants, h.wantsVolumeGone)
	h.mu.Lock()
	fresh := h.factsSeq > 0
	h.mu.Unlock()
	if !fresh {
		h.lookAround(ctx)
	}
	limit := time.NewTimer(wait)
	defer limit.Stop()
	o := &observation{host: h, send: send, after: after, gone: after}
	complete := false
	for {
		top, changed := h.journal.Seq()
		facts, factsSeq, factsMoved := h.currentFacts()
		if o.facts != factsSeq {
			if err := o.tellFacts(facts, factsSeq); err != nil {
				return err
			}
		}
		if err := o.tell(top, !complete); err != nil {
			return err
		}
		complete = true
		if o.sent >= ObserveRecords {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return nil
		case <-changed:
		case <-factsMoved:
		}
	}
}

func (o *observation) tellFacts(f Facts, seq int64) error {
	f.Clock = o.host.clock.Now().Wall
	o.facts = seq
	return o.send(Batch{Seq: o.after, Facts: &f, JournalID: o.host.journal.ID()})
}

// tell sends what is newer than what was told, up to top.
func (o *observation) tell(top int64, first bool) error {
	h := o.host
	records := h.journal.Records(func(r *Record) bool { return r.Seq > o.after && r.Seq <= top })
	more := len(records) > ObserveRecords-o.sent
	if more {
		records = records[:ObserveRecords-o.sent]
	}
	h.mu.Lock()
	silent := h.silentSince
	h.mu.Unlock()
	volumes := h.journal.RemovedVolumes(o.gone)
	o.gone = max(o.gone, top)
	if len(records) == 0 && !first && len(volumes) == 0 {
		o.after = max(o.after, top)
		return nil
	}
	for last := false; !last; {
		part := records[:min(batchRecords, len(records))]
		records = records[len(part):]
		last = len(records) == 0
		// Volumes stand in the first batch, so that no number is acknowledged before them.
		b := Batch{Seq: o.after, JournalID: h.journal.ID(), VolumesRemoved: volumes}
		volumes = nil
		if len(part) > 0 {
			b.Seq = part[len(part)-1].Seq
		}
		if last && !more {
			b.Seq, b.Complete = max(top, o.after), first
		}
		now := h.clock.Now()
		for i := range part {
			b.Runs = append(b.Runs, part[i].observed(now, silent))
		}
		if err := o.send(b); err != nil {
			return err
		}
		o.sent += len(part)
		o.after = max(o.after, b.Seq)
	}
	return nil
}

func (h *Host) currentFacts() (Facts, int64, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.facts, h.factsSeq, h.factsMoved
}

func (h *Host) wants(k Key) bool {
	d, _ := h.desiredOf(k)
	return d != nil || !h.known()
}

func (h *Host) wantsVolumeGone(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.volumesGone[id] || !h.applied
}

// Logs calls each with the lines of a run's first process. Of a run that is gone the kept last lines are left, without times.
func (h *Host) Logs(ctx context.Context, k Key, q LogQuery, each func(at time.Time, line string) error) error {
	r, known := h.journal.Record(k)
	if !known || r.ContainerID == "" {
		return Errorf(KindNotFound, "this host has no container of run %s", k)
	}
	line := func(at time.Time, text string) error { return each(at, validUTF8(text)) }
	if r.Phase != PhaseGone {
		err := h.runtime.Logs(ctx, r.ContainerID, q, line)
		if KindOf(err) != KindNotFound {
			return err
		}
	}
	tail := r.LogTail
	if q.Tail > 0 && len(tail) > q.Tail {
		tail = tail[len(tail)-q.Tail:]
	}
	for _, text := range tail {
		if err := line(time.Time{}, text); err != nil {
			return err
		}
	}
	return nil
}
