package sqlite

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

// mostDifferences bounds a verdict.
const mostDifferences = 100

// CheckLedger recomputes every lease from the ledger's facts and tells each difference in one sentence: facts that are missing, doubled
// or other than the lease says, segments that do not sum to the lease, leases of one device that overlap (also of its whole and its
// parts), and rows of the ledger that were changed or taken away.
func (db *DB) CheckLedger(ctx context.Context, now time.Time) (leases int64, differences []string, err error) {
	c := &check{now: millis(now)}
	err = db.read(ctx, func(t *tx) error {
		*c = check{now: c.now}
		if err := c.chain(t); err != nil {
			return err
		}
		if err := c.facts(t); err != nil {
			return err
		}
		if err := c.overlaps(t); err != nil {
			return err
		}
		if err := c.family(t); err != nil {
			return err
		}
		return c.backing(t)
	})
	if c.more > 0 {
		c.found = append(c.found, fmt.Sprintf("and %d more", c.more))
	}
	return c.leases, c.found, err
}

type check struct {
	now    int64
	leases int64
	found  []string
	more   int
	id     int64 // lease whose facts are being read
	lease  checkedLease
}

type checkedLease struct {
	usage.Lease
	user, project, pool, model, workspace string
	changes                               int
	opens, ends                           int
	endAt                                 int64
	last                                  usage.Key
}

func (c *check) report(format string, args ...any) {
	if len(c.found) < mostDifferences {
		c.found = append(c.found, fmt.Sprintf(format, args...))
		return
	}
	c.more++
}

// chain follows the hashes and the order of commits.
func (c *check) chain(t *tx) error {
	var before []byte
	var lastID, lastCommit int64
	return each(t, func(s scanner) error {
		var id int64
		var f fact
		var hash []byte
		if err := s.Scan(&id, &f.lease, &f.kind, &f.at, &f.committedAt, &f.user, &f.project, &f.pool, &f.model, &f.workspace, &hash); err != nil {
			return err
		}
		if want := f.hash(before); !bytes.Equal(want, hash) || id != lastID+1 {
			c.report("ledger row %d was changed, or a row before it was changed or taken away", id)
		}
		if f.committedAt < lastCommit {
			c.report("ledger row %d was committed before the row above it", id)
		}
		before, lastID, lastCommit = hash, id, f.committedAt
		return nil
	}, `SELECT id, lease, kind, at, committed_at, user, project, pool, model, workspace, hash FROM ledger ORDER BY id`)
}

// facts holds each lease against its facts.
func (c *check) facts(t *tx) error {
	err := each(t, func(s scanner) error {
		var id, started int64
		var ended *int64
		var l checkedLease
		var kind *string
		var at *int64
		var user, project, pool, model, workspace *string
		err := s.Scan(&id, &started, &ended, &l.user, &l.project, &l.pool, &l.model, &l.workspace, &l.changes, &kind, &at, &user, &project, &pool, &model, &workspace)
		if err != nil {
			return err
		}
		if id != c.id {
			c.finish()
			l.ID, l.Start, l.Open = id, started, ended == nil
			if !l.Open {
				l.End = *ended
			}
			c.id, c.lease = id, l
			c.leases++
		}
		if kind == nil {
			return nil
		}
		if *workspace != c.lease.workspace {
			c.report("lease %d: a fact names workspace %s, the lease %s", id, *workspace, c.lease.workspace)
		}
		c.take(fleet.FactKind(*kind), *at, usage.Key{User: fleet.UserID(*user), Project: *project, Pool: *pool, Model: *model})
		return nil
	}, `SELECT lease.id, lease.started_at, lease.ended_at, lease.user, lease.project, lease.pool, lease.model, lease.workspace, lease.changes,
		ledger.kind, ledger.at, ledger.user, ledger.project, ledger.pool, ledger.model, ledger.workspace
		FROM lease LEFT JOIN ledger ON ledger.lease = lease.id ORDER BY lease.id, ledger.id`)
	if err == nil {
		c.finish()
	}
	return err
}

func (c *check) take(kind fleet.FactKind, at int64, key usage.Key) {
	l := &c.lease
	switch kind {
	case fleet.FactOpen:
		l.opens++
		l.Key, l.last = key, key
		if at != l.Start {
			c.report("lease %d starts at %s, its open fact says %s", l.ID, clock(l.Start), clock(at))
		}
	case fleet.FactChange:
		l.Changes = append(l.Changes, usage.Change{At: at, Key: key})
		l.last = key
	case fleet.FactEnd:
		l.ends++
		l.endAt = at
	default:
		c.report("lease %d has a fact %q", l.ID, kind)
	}
}

// finish judges the lease whose facts were read.
func (c *check) finish() {
	l := &c.lease
	if c.id == 0 {
		return
	}
	ends := 1
	if l.Open {
		ends = 0
	}
	switch {
	case l.opens != 1 || l.ends != ends || len(l.Changes) != l.changes:
		c.report("lease %d has %d open, %d change and %d end facts; 1, %d and %d are right", l.ID, l.opens, len(l.Changes), l.ends, l.changes, ends)
		return
	case !l.Open && l.endAt != l.End:
		c.report("lease %d ends at %s, its end fact says %s", l.ID, clock(l.End), clock(l.endAt))
	case l.last != usage.Key{User: fleet.UserID(l.user), Project: l.project, Pool: l.pool, Model: l.model}:
		c.report("lease %d is billed to other names than its last fact says", l.ID)
	}
	end := l.End
	if l.Open {
		end = max(c.now, l.Start)
	}
	at := l.Start
	for _, s := range l.Segments(c.now) {
		if s.From != at || s.To < s.From {
			c.report("lease %d: its segments leave a gap or overlap at %s", l.ID, clock(at))
		}
		at = s.To
	}
	if at != end {
		c.report("lease %d: its segments sum to %d ms, its length is %d ms", l.ID, at-l.Start, end-l.Start)
	}
}

func clock(ms int64) string { return fromMillis(ms).Format(time.RFC3339Nano) }

// overlaps finds leases of one device of which the next began before the one before was released.
func (c *check) overlaps(t *tx) error {
	return each(t, func(s scanner) error {
		var first, second int64
		var device string
		err := s.Scan(&first, &second, &device)
		c.report("leases %d and %d of device %s overlap", first, second, device)
		return err
	}, `SELECT before, id, device FROM (
			SELECT id, device, started_at, lag(id) OVER held AS before, lag(coalesce(released_at, 9223372036854775807)) OVER held AS released
			FROM lease WINDOW held AS (PARTITION BY device ORDER BY started_at, id))
		WHERE released > started_at`)
}

// family finds leases of a device and of its whole at one time.
func (c *check) family(t *tx) error {
	return each(t, func(s scanner) error {
		var part, whole int64
		err := s.Scan(&part, &whole)
		c.report("leases %d and %d are of a device and of its whole at one time", part, whole)
		return err
	}, `SELECT part.id, whole.id FROM device JOIN lease AS part ON part.device = device.id JOIN lease AS whole ON whole.device = device.parent
		WHERE device.parent <> '' AND part.started_at < coalesce(whole.released_at, 9223372036854775807) AND whole.started_at < coalesce(part.released_at, 9223372036854775807)`)
}

// backing finds open leases of runs that are gone, and activity that is longer than its lease.
func (c *check) backing(t *tx) error {
	err := each(t, func(s scanner) error {
		var id int64
		err := s.Scan(&id)
		c.report("lease %d is open, its run is gone", id)
		return err
	}, `SELECT lease.id FROM lease JOIN run ON run.workspace = lease.workspace AND run.epoch = lease.epoch WHERE lease.released_at IS NULL AND run.gone_at IS NOT NULL`)
	if err != nil {
		return err
	}
	return each(t, func(s scanner) error {
		var id int64
		err := s.Scan(&id)
		c.report("lease %d: its activity does not fit into it, or its hours do not sum to its total", id)
		return err
	}, `SELECT lease.id FROM lease JOIN lease_total ON lease_total.lease = lease.id
		WHERE (lease.ended_at IS NOT NULL AND lease_total.active_ms + lease_total.idle_ms > lease.ended_at - lease.started_at)
		OR lease_total.active_ms <> (SELECT coalesce(sum(active_ms), 0) FROM lease_activity WHERE lease_activity.lease = lease.id)
		OR lease_total.idle_ms <> (SELECT coalesce(sum(idle_ms), 0) FROM lease_activity WHERE lease_activity.lease = lease.id)`)
}
