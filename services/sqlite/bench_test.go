package sqlite_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
)

// benchFleet is a store with hosts of eight devices.
func benchFleet(b *testing.B, hosts int) (*room, []fleet.HostID) {
	r := newRoom(b)
	var ids []fleet.HostID
	for h := range hosts {
		host := r.host(fmt.Sprintf("g%04d", h))
		list := make([]fleet.DeviceID, 0, 8)
		for d := range 8 {
			list = append(list, fleet.DeviceID(fmt.Sprintf("GPU-%04d-%d", h, d)))
		}
		r.observe(fleet.Observation{Host: host.ID, Facts: &fleet.HostFacts{EngineVersion: "20.10", CPUs: 64, MemoryMiB: 524288, Devices: devices(list...)}})
		ids = append(ids, host.ID)
	}
	return r, ids
}

// BenchmarkPlacements commits plans of 1,000 placements, each durable with its lease and facts.
func BenchmarkPlacements(b *testing.B) {
	ctx := context.Background()
	r, hosts := benchFleet(b, 125)
	var total time.Duration
	placed := 0
	for b.Loop() {
		var plan fleet.Plan
		for h, host := range hosts {
			for d := range 8 {
				w, _, err := r.CreateWorkspace(ctx, r.order(r.ana, fmt.Sprintf("w%d-%d-%d", placed, h, d), 1), r.now)
				r.ok(err)
				plan.Placements = append(plan.Placements, fleet.Placement{
					Run: fleet.RunKey{Workspace: w.ID, Epoch: 1}, Host: host, Devices: []fleet.DeviceID{fleet.DeviceID(fmt.Sprintf("GPU-%04d-%d", h, d))}, CPUMillis: 1000, MemoryMiB: 1024,
				})
			}
		}
		begin := time.Now()
		done, err := r.Commit(ctx, plan, r.now)
		total += time.Since(begin)
		r.ok(err)
		if len(done.Placed) != 1000 {
			b.Fatalf("placed %d", len(done.Placed))
		}
		placed += 1000
		for h, host := range hosts {
			var gone []fleet.ObservedRun
			for d := range 8 {
				gone = append(gone, fleet.ObservedRun{Key: plan.Placements[8*h+d].Run, Phase: fleet.PhaseGone, EndedAt: r.now})
			}
			r.observe(fleet.Observation{Host: host, Runs: gone})
		}
	}
	b.ReportMetric(float64(placed)/total.Seconds(), "placements/s")
}

// BenchmarkGroupCommit is small durable writes from many callers, against one transaction each by the same driver.
func BenchmarkGroupCommit(b *testing.B) {
	ctx := context.Background()
	r := newRoom(b)
	const statement = `INSERT INTO audit (at, actor, verb, subject) VALUES (1, 'actor', 'verb', 'subject')`
	raw, err := sql.Open("sqlite", "file:"+b.TempDir()+"/raw.db?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)")
	r.ok(err)
	defer raw.Close()
	_, err = raw.Exec(`CREATE TABLE audit (id INTEGER PRIMARY KEY, at INTEGER, actor TEXT, verb TEXT, subject TEXT) STRICT`)
	r.ok(err)
	const each = 2000
	var ours, theirs time.Duration
	rounds := 0
	for b.Loop() {
		rounds++
		begin := time.Now()
		var left atomic.Int64
		left.Store(each)
		var group sync.WaitGroup
		for range 128 {
			group.Go(func() {
				for left.Add(-1) >= 0 {
					if err := r.WriteText(ctx, r.now, nil, statement); err != nil {
						b.Error(err)
					}
				}
			})
		}
		group.Wait()
		ours += time.Since(begin)
		begin = time.Now()
		for range each / 10 {
			_, err := raw.Exec(statement)
			r.ok(err)
		}
		theirs += time.Since(begin) * 10
	}
	b.ReportMetric(float64(each*rounds)/ours.Seconds(), "writes/s")
	b.ReportMetric(theirs.Seconds()/ours.Seconds(), "x_one_by_one")
}

// BenchmarkSamples is one sample of each of 1,000 devices of 125 hosts, all hosts at once, with roll-ups.
func BenchmarkSamples(b *testing.B) {
	ctx := context.Background()
	r, hosts := benchFleet(b, 125)
	for h, host := range hosts {
		w := r.create(r.ana, fmt.Sprintf("w%d", h), 8)
		var ids []fleet.DeviceID
		for d := range 8 {
			ids = append(ids, fleet.DeviceID(fmt.Sprintf("GPU-%04d-%d", h, d)))
		}
		r.place(w, host, ids...)
	}
	busy, samples := 50, 0
	begin := time.Now()
	for b.Loop() {
		r.now = r.now.Add(10 * time.Second)
		var group sync.WaitGroup
		for h, host := range hosts {
			var list []fleet.Sample
			for d := range 8 {
				list = append(list, fleet.Sample{Device: fleet.DeviceID(fmt.Sprintf("GPU-%04d-%d", h, d)), At: r.now, UtilizationPercent: &busy})
			}
			samples += len(list)
			group.Go(func() {
				if err := r.RecordSamples(ctx, host, list, 10*time.Second, r.now); err != nil {
					b.Error(err)
				}
			})
		}
		group.Wait()
	}
	b.ReportMetric(float64(samples)/time.Since(begin).Seconds(), "samples/s")
}

// BenchmarkReport is a month's report over 20,000 leases with a million lease-hours, against a GROUP BY of the hours by the same driver
// on the same file.
func BenchmarkReport(b *testing.B) {
	ctx := context.Background()
	r := newRoom(b)
	const leases, hours = 20_000, 50
	w := r.create(r.ana, "w1", 0)
	key := r.ready(w, r.h1.ID)
	r.gone(key, r.now)
	raw := r.raw()
	start := r.now.UnixMilli()
	for _, s := range []string{
		`DROP TRIGGER ledger_order`,
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO lease (device, workspace, epoch, host, user, project, pool, model, started_at, ended_at, released_at)
			SELECT 'G' || (i %% 4), '%s', 1, '%s', CASE i %% 3 WHEN 0 THEN '%s' ELSE '%s' END, 'default', 'default', '4090', %d + i * 1000, %d + i * 1000 + %d, %d + i * 1000 + %d FROM n`,
			leases, w.ID, r.h1.ID, r.bo.ID, r.ana.ID, start, start, hours*hour, start, hours*hour),
		fmt.Sprintf(`WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < %d)
			INSERT INTO lease_activity (lease, hour, active_ms, idle_ms) SELECT lease.id, lease.started_at - lease.started_at %% 3600000 + 3600000 * n.i, 1200000, 600000 FROM lease, n`, hours-1),
		`INSERT INTO lease_total (lease, active_ms, idle_ms, sampled_to) SELECT lease, sum(active_ms), sum(idle_ms), max(hour) FROM lease_activity GROUP BY lease`,
	} {
		_, err := raw.Exec(s)
		r.ok(err)
	}
	r.now = r.now.Add(30 * 24 * time.Hour)
	q := fleet.UsageQuery{By: "user", From: r.now.Add(-31 * 24 * time.Hour), To: r.now, Now: r.now}
	var ours, theirs time.Duration
	rounds := 0
	for b.Loop() {
		rounds++
		begin := time.Now()
		report, err := r.Report(ctx, q)
		ours += time.Since(begin)
		r.ok(err)
		begin = time.Now()
		total := activeByGroupBy(r, raw)
		theirs += time.Since(begin)
		if report.Total.ActiveMs != total || report.Total.GPUMs != leases*hours*hour {
			b.Fatalf("report %+v, raw %d", report.Total, total)
		}
	}
	b.ReportMetric(ours.Seconds()*1000/float64(rounds), "ms/report")
	b.ReportMetric(theirs.Seconds()/ours.Seconds(), "x_group_by")
	by := q
	by.By = "day"
	begin := time.Now()
	_, err := r.Report(ctx, by)
	r.ok(err)
	b.ReportMetric(float64(time.Since(begin).Milliseconds()), "ms/by_day")
	_ = sqlite.IDLength
}

// activeByGroupBy is the plain query that a report is held against.
func activeByGroupBy(r *room, raw *sql.DB) (total int64) {
	rows, err := raw.Query(`SELECT lease.user, sum(lease_activity.active_ms), sum(lease_activity.idle_ms) FROM lease JOIN lease_activity ON lease_activity.lease = lease.id GROUP BY lease.user`)
	r.ok(err)
	defer rows.Close()
	var active, idle int64
	var user string
	for rows.Next() {
		r.ok(rows.Scan(&user, &active, &idle))
		total += active
	}
	r.ok(rows.Err())
	return total
}
