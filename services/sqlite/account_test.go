package sqlite_test

import (
	"context"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/sqlite"
	"github.com/carrel-dev/carrel/services/usage"
)

func TestSilentHostAndChangedProject_D2(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.ok(r.CreateProject(ctx, fleet.Project{Name: "vision"}, r.now))
	r.at("10:00:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.at("11:25:00")
	r.ok(r.Seen(ctx, r.h1.ID, r.now))
	r.at("12:00:00")
	_, err := r.ChangeProject(ctx, w.ID, "vision", r.now)
	r.ok(err)
	r.at("12:30:00")
	meanwhile := r.report(fleet.UsageQuery{By: usage.ByProject})
	if len(meanwhile.Rows) != 2 || !meanwhile.Total.Provisional || !meanwhile.Total.Open || meanwhile.Total.GPUMs != 5*hour/2 {
		t.Errorf("meanwhile %+v", meanwhile)
	}
	r.at("13:00:00")
	r.gone(key, time.Date(2026, 5, 1, 11, 30, 0, 0, time.UTC))
	got := r.report(fleet.UsageQuery{By: usage.ByProject})
	if len(got.Rows) != 1 || got.Rows[0].Key != "default" || got.Rows[0].GPUMs != 3*hour/2 || got.Total.Open || got.Total.Provisional {
		t.Errorf("after the end was learnt: %+v, want 1.5 hours of default", got)
	}
	r.checked()
}

func TestEndIsWhatTheAgentKnows_ACCT05(t *testing.T) {
	r := newRoom(t)
	r.at("09:30:00")
	knows, survives := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1)
	k1, k2 := r.ready(knows, r.h1.ID, "G0"), r.ready(survives, r.h1.ID, "G1")
	r.at("11:00:00") // the gateway was down from 10:00
	r.said(fleet.ObservedRun{Key: k2, Phase: fleet.PhaseReady})
	r.gone(k1, time.Date(2026, 5, 1, 10, 20, 0, 0, time.UTC))
	l := r.leases(knows.ID)[0]
	if l.EndedAt.Format("15:04") != "10:20" || !l.ReleasedAt.Equal(r.now) {
		t.Errorf("lease %+v, want its end at 10:20", l)
	}
	if leases := r.leases(survives.ID); len(leases) != 1 || !leases[0].EndedAt.IsZero() {
		t.Errorf("the surviving one has %+v", leases)
	}
	// An end before the start or after now is clamped.
	r.at("12:00:00")
	r.gone(k2, r.now.Add(time.Hour))
	if l := r.leases(survives.ID)[0]; !l.EndedAt.Equal(r.now) {
		t.Errorf("lease %+v ends in the future", l)
	}
	w3 := r.create(r.ana, "w3", 1)
	k3 := r.ready(w3, r.h1.ID, "G2")
	r.gone(k3, r.now.Add(-time.Hour))
	if l := r.leases(w3.ID)[0]; !l.EndedAt.Equal(l.StartedAt) {
		t.Errorf("lease %+v ends before its start", l)
	}
	r.checked()
}

// One rule, from the commit of the placement to the end as observed: waiting is free, and pull, start, run and a stop that hangs are billed,
// since nobody else can have the device meanwhile. The lease as it is shown and the report say the same.
func TestBilledIsPlacementToObservedEnd_ACCT11(t *testing.T) {
	r := newRoom(t)
	r.at("09:00:00")
	w := r.create(r.ana, "w1", 1) // waits for 10 min
	r.at("09:10:00")
	key := r.place(w, r.h1.ID, "G0")
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhasePulling})
	r.at("09:20:00")
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseStarting, StartedAt: r.now})
	r.at("09:22:00")
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseReady, StartedAt: r.now.Add(-2 * time.Minute), ReadyAt: r.now})
	r.at("10:22:00")
	r.stop(w.ID, fleet.GoalStopped)
	r.said(fleet.ObservedRun{Key: key, Phase: fleet.PhaseStopping})
	r.at("10:29:00") // it was killed at 10:27, which is learnt now
	r.gone(key, r.now.Add(-2*time.Minute))
	const want = 77 * time.Minute
	leases := r.leases(w.ID)
	if len(leases) != 1 || leases[0].EndedAt.Sub(leases[0].StartedAt) != want {
		t.Errorf("leases %+v, want one of %s", leases, want)
	}
	for _, by := range []string{usage.ByUser, usage.ByPool, usage.ByWorkspace, usage.ByLease} {
		if got := r.report(fleet.UsageQuery{By: by}); len(got.Rows) != 1 || got.Rows[0].GPUMs != want.Milliseconds() || got.Total.GPUMs != want.Milliseconds() {
			t.Errorf("by %s: %+v, want %s", by, got, want)
		}
	}
	r.checked()
}

func TestWaitingIsOneIntervalOverRestarts_ACCT07(t *testing.T) {
	path := t.TempDir() + "/state/carrel.db"
	options := func(o *sqlite.Options) { o.Path = path }
	r := newRoom(t, options)
	begin := r.now
	w1, w2 := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1)
	for range 3 {
		r.now = r.now.Add(time.Minute)
		r.ok(r.Close())
		r.DB = open(t, sqlite.Options{Path: path, BallastMiB: -1})
	}
	if waiting := r.snapshot().Waiting; len(waiting) != 2 || !waiting[0].SubmittedAt.Equal(begin) {
		t.Fatalf("waiting %+v", waiting)
	}
	key := r.ready(w1, r.h1.ID, "G0")
	run := r.run(key)
	if wait := run.StartedAt.Sub(run.QueuedAt); wait != 3*time.Minute || run.Key.Epoch != 1 {
		t.Errorf("waited %s in epoch %d", wait, run.Key.Epoch)
	}
	r.stop(w2.ID, fleet.GoalStopped)
	dropped := r.run(fleet.RunKey{Workspace: w2.ID, Epoch: 1})
	if dropped.EndedAt.Sub(dropped.QueuedAt) != 3*time.Minute || !dropped.StartedAt.IsZero() || dropped.GoneAt.IsZero() {
		t.Errorf("cancelled run %+v", dropped)
	}
	r.now = r.now.Add(time.Hour)
	report := r.report(fleet.UsageQuery{By: usage.ByWorkspace})
	if len(report.Rows) != 1 || report.Rows[0].Key != "ana/w1" {
		t.Errorf("report %+v", report.Rows)
	}
}

func TestFullHoursAreExactWhateverSamplesDo_ACCT10(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("09:20:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	random := rand.New(rand.NewPCG(1, 2))
	busy := 80
	for end := r.now.Add(3 * time.Hour); r.now.Before(end); r.now = r.now.Add(10*time.Second + time.Duration(random.IntN(20_000))*time.Millisecond) {
		if random.IntN(20) == 0 {
			continue // lost
		}
		sample := fleet.Sample{Device: "G0", At: r.now, UtilizationPercent: &busy}
		r.ok(r.RecordSamples(ctx, r.h1.ID, []fleet.Sample{sample, sample}, 10*time.Second, r.now))
	}
	r.gone(key, r.now)
	for h := 10; h < 12; h++ {
		from := time.Date(2026, 5, 1, h, 0, 0, 0, time.UTC)
		got := r.report(fleet.UsageQuery{From: from, To: from.Add(time.Hour)}).Total
		if got.GPUMs != hour || got.ActiveMs+got.UnknownMs != hour || got.ActiveMs < hour*3/4 {
			t.Errorf("hour %d: %+v", h, got)
		}
	}
	whole := r.report(fleet.UsageQuery{}).Total
	byDay := r.report(fleet.UsageQuery{By: usage.ByDay}).Total
	if whole.ActiveMs != byDay.ActiveMs || whole.GPUMs != byDay.GPUMs || whole.ActiveMs > whole.GPUMs {
		t.Errorf("totals %+v and hours %+v differ", whole, byDay)
	}
	r.checked()
}

func TestActivityAfterALateEndIsTakenAway(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("09:50:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	busy, idle := 50, 0
	for i := range 6 * 60 {
		r.now = r.now.Add(10 * time.Second)
		load := &busy
		if i%2 == 0 {
			load = &idle
		}
		r.ok(r.RecordSamples(ctx, r.h1.ID, []fleet.Sample{{Device: "G0", At: r.now, UtilizationPercent: load}, {Device: "G9", At: r.now, UtilizationPercent: load}}, 10*time.Second, r.now))
	}
	// Replayed samples, a stale one and one without a figure add nothing.
	before := r.report(fleet.UsageQuery{}).Total
	r.ok(r.RecordSamples(ctx, r.h1.ID, []fleet.Sample{{Device: "G0", At: r.now, UtilizationPercent: &busy}, {Device: "G0", At: r.now.Add(time.Minute)}, {Device: "G0", At: r.now.Add(time.Minute), UtilizationPercent: &busy, Stale: true}}, 10*time.Second, r.now))
	if after := r.report(fleet.UsageQuery{}).Total; after != before || before.ActiveMs != hour/2 || before.IdleMs != hour/2 || before.UnknownMs != 0 {
		t.Fatalf("%+v, then %+v", before, after)
	}
	r.gone(key, time.Date(2026, 5, 1, 10, 15, 0, 0, time.UTC))
	got := r.report(fleet.UsageQuery{}).Total
	if got.GPUMs != 25*60_000 || got.ActiveMs+got.IdleMs+got.UnknownMs != got.GPUMs || got.UnknownMs != 0 {
		t.Errorf("%+v", got)
	}
	r.checked()
}

func TestReplaysBookNothingTwice_ACCT13(t *testing.T) {
	r := newRoom(t)
	r.at("10:00:00")
	w := r.create(r.ana, "w1", 1)
	key := r.place(w, r.h1.ID, "G0")
	messages := []fleet.ObservedRun{
		{Key: key, Phase: fleet.PhaseStarting},
		{Key: key, Phase: fleet.PhaseReady, StartedAt: r.now, ReadyAt: r.now},
		{Key: key, Phase: fleet.PhaseGone, EndedAt: r.now.Add(time.Hour)},
	}
	r.at("11:00:30")
	for _, m := range messages {
		r.said(m)
	}
	want := r.leases(w.ID)
	for i := range 4 {
		r.now = r.now.Add(time.Minute)
		if i == 3 {
			r.now = r.now.Add(24 * time.Hour)
		}
		for j := range messages {
			m := messages[(j*2+i)%len(messages)]
			m.EndedAt = m.EndedAt.Add(time.Duration(i) * time.Minute)
			r.said(m)
		}
		r.observe(fleet.Observation{Host: r.h1.ID, JournalID: "journal-" + string(rune('a'+i)), Runs: messages})
	}
	got := r.leases(w.ID)
	if len(got) != 1 || got[0] != want[0] || got[0].EndedAt.Sub(got[0].StartedAt) != time.Hour {
		t.Errorf("leases %+v, were %+v", got, want)
	}
	r.checked()
}

func TestEndIsWrittenOnce_ACCT14(t *testing.T) {
	r := newRoom(t)
	r.at("09:00:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.at("10:00:00")
	r.stop(w.ID, fleet.GoalStopped)
	end := time.Date(2026, 5, 1, 10, 0, 2, 0, time.UTC)
	r.at("10:00:03")
	r.gone(key, end)
	r.at("10:10:00")
	r.gone(key, time.Date(2026, 5, 1, 10, 7, 0, 0, time.UTC))
	r.gone(key, time.Time{})
	if l := r.leases(w.ID)[0]; !l.EndedAt.Equal(end) {
		t.Errorf("the end moved to %s", l.EndedAt)
	}
	if run := r.run(key); !run.EndedAt.Equal(end) {
		t.Errorf("the run's end moved to %s", run.EndedAt)
	}
	r.checked()
}

func TestMonthsAndOpenLeases_ACCT01_ACCT15(t *testing.T) {
	r := newRoom(t)
	month := func(m time.Month) fleet.UsageQuery {
		return fleet.UsageQuery{From: time.Date(2026, m, 1, 0, 0, 0, 0, time.UTC), To: time.Date(2026, m+1, 1, 0, 0, 0, 0, time.UTC)}
	}
	r.now = time.Date(2026, 5, 31, 22, 0, 0, 0, time.UTC)
	ended, open := r.create(r.ana, "w1", 2), r.create(r.bo, "w2", 1)
	key := r.ready(ended, r.h1.ID, "G0", "G1")
	r.ready(open, r.h1.ID, "G2")
	r.now = time.Date(2026, 6, 1, 4, 0, 0, 0, time.UTC)
	r.gone(key, r.now)
	r.now = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)
	ana := func(q fleet.UsageQuery) int64 {
		q.User = r.ana.ID
		return r.report(q).Total.GPUMs
	}
	if may, june := ana(month(5)), ana(month(6)); may != 4*hour || june != 8*hour {
		t.Errorf("May %d, June %d", may, june)
	}
	q := month(5)
	q.By = usage.ByLease
	r.ok(r.Seen(context.Background(), r.h1.ID, r.now))
	first := r.report(q)
	r.now = r.now.Add(7 * 24 * time.Hour)
	r.ok(r.Seen(context.Background(), r.h1.ID, r.now))
	second := r.report(q)
	for i := range first.Rows {
		if first.Rows[i] != second.Rows[i] {
			t.Errorf("the closed month changed from %+v to %+v", first.Rows[i], second.Rows[i])
		}
	}
	now := r.report(fleet.UsageQuery{By: usage.ByLease, User: r.bo.ID})
	if len(now.Rows) != 1 || !now.Rows[0].EndedAt.IsZero() || !now.Rows[0].Open || now.Rows[0].GPUMs != r.now.Sub(now.Rows[0].StartedAt).Milliseconds() {
		t.Errorf("running row %+v", now.Rows)
	}
	// Marked in closed months too while its host does not answer.
	r.now = r.now.Add(time.Hour)
	if got := r.report(month(5)); !got.Total.Provisional {
		t.Errorf("%+v is not provisional", got.Total)
	}
}

func TestDeleteEndsTheBillAndKeepsHistory_ACCT18(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("10:00:00")
	running, queued, stopping := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1), r.create(r.ana, "w3", 1)
	k1, k3 := r.ready(running, r.h1.ID, "G0"), r.ready(stopping, r.h1.ID, "G1")
	r.stop(stopping.ID, fleet.GoalStopped)
	r.at("11:00:00")
	for _, w := range []fleet.Workspace{running, queued, stopping} {
		r.stop(w.ID, fleet.GoalDeleted)
		r.stop(w.ID, fleet.GoalDeleted)
	}
	if got := r.workspace(queued.ID); got.State != fleet.StateDeleted {
		t.Errorf("queued one is %s", got.State)
	}
	_, err := r.QueueRun(ctx, fleet.StartOrder{Workspace: running.ID}, r.now)
	r.kind(err, fleet.KindConflict)
	r.gone(k1, r.now)
	r.gone(k3, r.now)
	r.at("11:01:00")
	minute := r.report(fleet.UsageQuery{By: usage.ByUser})
	_, err = r.UpdateUser(ctx, "ana", func(u *fleet.User) error { u.DeletedAt = r.now; return nil }, r.now)
	r.ok(err)
	r.now = r.now.Add(24 * time.Hour)
	day := r.report(fleet.UsageQuery{By: usage.ByUser})
	if len(minute.Rows) != 1 || minute.Rows[0] != day.Rows[0] || day.Rows[0].Key != "ana" || day.Rows[0].GPUMs != 2*hour || day.Rows[0].Open {
		t.Errorf("after a minute %+v, after a day %+v", minute.Rows, day.Rows)
	}
	r.checked()
}

func TestClockSetBackLosesNothing_I17(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("10:00:00")
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	r.at("11:00:00")
	r.ok(r.Seen(ctx, r.h1.ID, r.now))
	r.at("10:00:01") // an hour back
	w2 := r.create(r.ana, "w2", 1)
	r.ready(w2, r.h1.ID, "G1")
	r.gone(key, time.Time{})
	if l := r.leases(w.ID)[0]; l.EndedAt.Sub(l.StartedAt) != time.Hour {
		t.Errorf("lease %+v", l)
	}
	if l := r.leases(w2.ID)[0]; l.StartedAt.Format("15:04") != "11:00" {
		t.Errorf("lease %+v began in the past", l)
	}
	r.at("11:30:00")
	r.checked()
}

func TestLedgerIsAppendOnlyAndLeasesExclude(t *testing.T) {
	r := newRoom(t)
	w := r.create(r.ana, "w1", 1)
	key := r.ready(w, r.h1.ID, "G0")
	raw := r.raw()
	for _, statement := range []string{
		`UPDATE ledger SET at = 0`, `DELETE FROM ledger`, `DELETE FROM lease`, `UPDATE lease SET started_at = 0`,
		`INSERT INTO lease (device, workspace, epoch, host, user, project, pool, model, started_at) SELECT device, workspace, epoch, host, user, project, pool, model, started_at FROM lease`,
		`UPDATE lease SET ended_at = started_at - 1, released_at = started_at`,
		`INSERT INTO ledger (lease, kind, at, committed_at, user, project, pool, model, workspace, hash) SELECT lease, 'change', 0, committed_at - 1, user, project, pool, model, workspace, hash FROM ledger`,
		`INSERT INTO ledger (lease, kind, at, committed_at, user, project, pool, model, workspace, hash) SELECT lease, 'open', 0, committed_at, user, project, pool, model, workspace, hash FROM ledger`,
	} {
		if _, err := raw.Exec(statement); err == nil {
			t.Errorf("allowed: %s", statement)
		}
	}
	r.gone(key, r.now)
	if _, err := raw.Exec(`UPDATE lease SET ended_at = started_at, released_at = started_at`); err == nil {
		t.Error("an end was written twice")
	}
}

func TestPartAndWholeOfADeviceAreNotLeasedTogether(t *testing.T) {
	r := newRoom(t)
	parts := devices("P", "M1", "M2", "G1")
	parts[1].Parent, parts[2].Parent = "P", "P"
	parts[1].Kind, parts[2].Kind = fleet.KindMIG, fleet.KindMIG
	r.facts(r.h1.ID, parts)
	w1, w2, w3 := r.create(r.ana, "w1", 1), r.create(r.ana, "w2", 1), r.create(r.ana, "w3", 1)
	key := r.ready(w1, r.h1.ID, "M1")
	for _, d := range r.snapshot().Hosts[0].Devices {
		if want := d.ID == "G1"; d.Free != want { // MIG instances are not given out yet
			t.Errorf("device %+v, want free %v", d, want)
		}
	}
	place := func(w fleet.Workspace, id fleet.DeviceID) int {
		p := fleet.Placement{Run: fleet.RunKey{Workspace: w.ID, Epoch: 1}, Host: r.h1.ID, Devices: []fleet.DeviceID{id}}
		done, err := r.Commit(context.Background(), fleet.Plan{Placements: []fleet.Placement{p}}, r.now)
		r.ok(err)
		return len(done.Placed)
	}
	if place(w2, "P") != 0 {
		t.Error("the whole was leased beside its part")
	}
	if place(w2, "M2") != 1 {
		t.Error("a sister part was refused")
	}
	r.gone(key, r.now)
	r.gone(fleet.RunKey{Workspace: w2.ID, Epoch: 1}, r.now)
	if place(w3, "P") != 1 {
		t.Error("the whole was refused with all parts free")
	}
	w4 := r.create(r.ana, "w4", 1)
	if place(w4, "M1") != 0 {
		t.Error("a part was leased beside its whole")
	}
	r.checked()
}

func TestCheckFindsWhatWasChangedByHand(t *testing.T) {
	for name, statements := range map[string][]string{
		"end in the lease": {`DROP TRIGGER lease_end_once`, `UPDATE lease SET ended_at = ended_at - 1000`},
		"fact":             {`DROP TRIGGER ledger_no_update`, `UPDATE ledger SET at = at - 1 WHERE kind = 'end'`},
		"missing fact":     {`DROP TRIGGER ledger_no_delete`, `DELETE FROM ledger WHERE kind = 'open'`},
		"project":          {`INSERT INTO project VALUES ('x', '', 0)`, `UPDATE lease SET project = 'x'`},
		"activity":         {`INSERT INTO lease_total (lease, active_ms, idle_ms, sampled_to) VALUES (1, 999999999, 0, 1)`},
		"overlap": {`INSERT INTO lease (device, workspace, epoch, host, user, project, pool, model, started_at, ended_at, released_at)
			SELECT device, workspace, epoch, host, user, project, pool, model, started_at + 1, ended_at, released_at FROM lease`},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRoom(t)
			w := r.create(r.ana, "w1", 1)
			key := r.ready(w, r.h1.ID, "G0")
			r.now = r.now.Add(time.Hour)
			r.gone(key, r.now)
			r.checked()
			raw := r.raw()
			for _, s := range statements {
				if _, err := raw.Exec(s); err != nil {
					t.Fatal(err)
				}
			}
			n, differences, err := r.CheckLedger(context.Background(), r.now)
			r.ok(err)
			if len(differences) == 0 || n == 0 {
				t.Errorf("nothing found in %d leases", n)
			}
			t.Log(strings.Join(differences, "; "))
		})
	}
}

func TestRatesHaveOneCurrencyAndValidity(t *testing.T) {
	r := newRoom(t)
	ctx := context.Background()
	r.at("10:00:00")
	_, err := r.AddRate(ctx, fleet.Rate{Model: "*", MicrosPerHour: 1_000_000, Currency: "EUR"}, r.now)
	r.ok(err)
	_, err = r.AddRate(ctx, fleet.Rate{Model: "4090", MicrosPerHour: 400_000, Currency: "EUR", From: r.now.Add(time.Hour)}, r.now)
	r.ok(err)
	_, err = r.AddRate(ctx, fleet.Rate{Model: "A10", MicrosPerHour: 1, Currency: "USD"}, r.now)
	r.kind(err, fleet.KindConflict)
	_, err = r.AddRate(ctx, fleet.Rate{Model: "*", MicrosPerHour: 2, Currency: "EUR"}, r.now)
	r.kind(err, fleet.KindExists)
	_, err = r.AddRate(ctx, fleet.Rate{Model: "*", MicrosPerHour: -2, Currency: "EUR"}, r.now)
	r.kind(err, fleet.KindInvalid)
	w := r.create(r.ana, "w1", 1)
	r.ready(w, r.h1.ID, "G0")
	r.at("12:00:00")
	got := r.report(fleet.UsageQuery{})
	if got.Total.CostMicros != 1_400_000 || got.Currency != "EUR" {
		t.Errorf("%+v", got)
	}
	rates, err := r.Rates(ctx)
	r.ok(err)
	if len(rates) != 2 || rates[0].Model != "4090" {
		t.Errorf("rates %+v", rates)
	}
}
