package sqlite

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

// RecordSamples adds measurements to the activity of the leases that hold the devices. A sample speaks for the time since the one
// before, at most for two intervals, and never for a time twice; one without a utilisation, or a stale one, says nothing.
func (db *DB) RecordSamples(ctx context.Context, host fleet.HostID, samples []fleet.Sample, interval time.Duration, now time.Time) error {
	useful := slices.DeleteFunc(slices.Clone(samples), func(s fleet.Sample) bool { return s.UtilizationPercent == nil || s.Stale })
	if len(useful) == 0 {
		return nil
	}
	return db.write(ctx, now, func(t *tx) error { return t.recordSamples(host, useful, interval.Milliseconds()) })
}

// sampledLease is an open lease and up to where samples covered it.
type sampledLease struct {
	id, started, sampledTo int64
}

// activityRow is time to add to a lease's hour.
type activityRow struct {
	lease, hour, active, idle int64
}

func (t *tx) recordSamples(host fleet.HostID, samples []fleet.Sample, interval int64) error {
	leases := map[fleet.DeviceID]*sampledLease{}
	err := each(t, func(row scanner) error {
		var device fleet.DeviceID
		var l sampledLease
		err := row.Scan(&device, &l.id, &l.started, &l.sampledTo)
		leases[device] = &l
		return err
	}, `SELECT lease.device, lease.id, lease.started_at, coalesce(lease_total.sampled_to, 0) FROM lease LEFT JOIN lease_total ON lease_total.lease = lease.id
		WHERE lease.host = ? AND lease.released_at IS NULL`, host)
	if err != nil {
		return err
	}
	slices.SortStableFunc(samples, func(a, b fleet.Sample) int { return a.At.Compare(b.At) })
	var hours, totals []activityRow // of totals, hour is up to where samples covered
	for _, s := range samples {
		l := leases[s.Device]
		if l == nil {
			continue
		}
		until := min(millis(s.At), t.now)
		from := max(l.started, until-2*interval)
		if l.sampledTo == 0 {
			from = max(l.started, until-interval)
		}
		from = max(from, l.sampledTo)
		if from >= until {
			continue
		}
		l.sampledTo = until
		active := *s.UtilizationPercent >= fleet.ActiveUtilizationPercent
		totals = append(totals, activity(l.id, until, until-from, active))
		for from < until {
			hour := from - from%usage.HourMs
			end := min(until, hour+usage.HourMs)
			hours = append(hours, activity(l.id, hour, end-from, active))
			from = end
		}
	}
	if err := t.addActivity(addHour, hours); err != nil {
		return err
	}
	return t.addActivity(addTotal, totals)
}

func activity(lease, hour, length int64, active bool) activityRow {
	if active {
		return activityRow{lease: lease, hour: hour, active: length}
	}
	return activityRow{lease: lease, hour: hour, idle: length}
}

const (
	addHour = `INSERT INTO lease_activity (lease, hour, active_ms, idle_ms) VALUES (?, ?, ?, ?)%s
		ON CONFLICT (lease, hour) DO UPDATE SET active_ms = active_ms + excluded.active_ms, idle_ms = idle_ms + excluded.idle_ms`
	addTotal = `INSERT INTO lease_total (lease, sampled_to, active_ms, idle_ms) VALUES (?, ?, ?, ?)%s
		ON CONFLICT (lease) DO UPDATE SET active_ms = active_ms + excluded.active_ms, idle_ms = idle_ms + excluded.idle_ms, sampled_to = max(sampled_to, excluded.sampled_to)`
	// rowsAtOnce rows in one statement cost about a third less than one by one.
	rowsAtOnce = 32
)

func (t *tx) addActivity(text string, rows []activityRow) error {
	for len(rows) > 0 {
		n := 1
		if len(rows) >= rowsAtOnce {
			n = rowsAtOnce
		}
		args := make([]any, 0, 4*n)
		for _, r := range rows[:n] {
			args = append(args, r.lease, r.hour, r.active, r.idle)
		}
		if err := t.exec(strings.Replace(text, "%s", strings.Repeat(", (?, ?, ?, ?)", n-1), 1), args...); err != nil {
			return err
		}
		rows = rows[n:]
	}
	return nil
}

// cutActivity takes away what samples saw after a lease's end, which may be learnt late, so that hours and total agree for good.
func (t *tx) cutActivity(lease fleet.LeaseID, end int64) error {
	var sampledTo int64
	err := t.row(`SELECT sampled_to FROM lease_total WHERE lease = ?`, lease).Scan(&sampledTo)
	if isNoRows(err) || (err == nil && sampledTo <= end) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := t.exec(`DELETE FROM lease_activity WHERE lease = ? AND hour >= ?`, lease, end); err != nil {
		return err
	}
	// In the last hour at most the lease's part of it can have been seen: first the active time stays, then the idle.
	err = t.exec(`UPDATE lease_activity SET active_ms = min(active_ms, part), idle_ms = min(idle_ms, part - min(active_ms, part))
		FROM (SELECT max(?2 - max(?2 - ?2 % ?3, started_at), 0) AS part FROM lease WHERE id = ?1) WHERE lease = ?1 AND hour = ?2 - ?2 % ?3`, lease, end, usage.HourMs)
	if err != nil {
		return err
	}
	return t.exec(`UPDATE lease_total SET sampled_to = ?2, (active_ms, idle_ms) =
		(SELECT coalesce(sum(active_ms), 0), coalesce(sum(idle_ms), 0) FROM lease_activity WHERE lease = ?1) WHERE lease = ?1`, lease, end)
}
