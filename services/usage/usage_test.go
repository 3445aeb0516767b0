package usage_test

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

func at(t *testing.T, text string) time.Time {
	t.Helper()
	v, err := time.Parse(time.RFC3339, text)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func zone(t *testing.T, name string) *time.Location {
	t.Helper()
	z, err := time.LoadLocation(name)
	if err != nil {
		t.Fatal(err)
	}
	return z
}

func closed(id int64, from, to time.Time) *usage.Lease {
	return &usage.Lease{
		ID: id, Device: "GPU-0", Workspace: "ana/w1", Start: from.UnixMilli(), End: to.UnixMilli(),
		Key: usage.Key{User: "u1", UserName: "ana", Project: "default", Pool: "default", Model: "4090"},
	}
}

func report(t *testing.T, q fleet.UsageQuery, rates []fleet.Rate, leases ...*usage.Lease) fleet.UsageReport {
	t.Helper()
	r, err := usage.NewReport(q, usage.NewRates(rates))
	if err != nil {
		t.Fatal(err)
	}
	first := int64(0)
	for i, l := range leases {
		if i == 0 || l.Start < first {
			first = l.Start
		}
	}
	r.Begin(first)
	for _, l := range leases {
		r.Add(l)
	}
	return r.Finish()
}

const hour = usage.HourMs

func TestMonthsSplitALeaseAtTheirEnd_ACCT01(t *testing.T) {
	from, to := at(t, "2026-01-31T22:00:00Z"), at(t, "2026-02-01T04:00:00Z")
	leases := []*usage.Lease{closed(1, from, to), closed(2, from, to)}
	now := at(t, "2026-03-15T00:00:00Z")
	for _, c := range []struct {
		from, to string
		want     int64
	}{
		{"2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", 4 * hour},
		{"2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z", 8 * hour},
		{"2026-01-31T23:00:00Z", "2026-02-01T01:00:00Z", 4 * hour},
		{"2026-01-01T00:00:00Z", "2026-03-01T00:00:00Z", 12 * hour},
		{"2026-03-01T00:00:00Z", "2026-03-15T00:00:00Z", 0},
	} {
		got := report(t, fleet.UsageQuery{From: at(t, c.from), To: at(t, c.to), Now: now}, nil, leases...)
		if got.Total.GPUMs != c.want {
			t.Errorf("%s to %s: %d ms, want %d", c.from, c.to, got.Total.GPUMs, c.want)
		}
	}
}

func TestDaysOf23And25Hours_ACCT03(t *testing.T) {
	lease := closed(1, at(t, "2026-01-01T00:00:00Z"), at(t, "2027-01-01T00:00:00Z"))
	now := at(t, "2027-02-01T00:00:00Z")
	berlin, newYork := zone(t, "Europe/Berlin"), zone(t, "America/New_York")
	window := func(z *time.Location, from, to string) fleet.UsageQuery {
		f, err := time.ParseInLocation(time.DateOnly, from, z)
		if err != nil {
			t.Fatal(err)
		}
		u, err := time.ParseInLocation(time.DateOnly, to, z)
		if err != nil {
			t.Fatal(err)
		}
		return fleet.UsageQuery{By: usage.ByDay, From: f, To: u, Location: z, Now: now}
	}
	for _, c := range []struct {
		zone     *time.Location
		from, to string
		hours    []int64 // per day; one number for a longer window: its sum
	}{
		{berlin, "2026-03-29", "2026-03-30", []int64{23}},
		{berlin, "2026-10-25", "2026-10-26", []int64{25}},
		{berlin, "2026-03-01", "2026-04-01", []int64{743}},
		{berlin, "2026-10-01", "2026-11-01", []int64{745}},
		{newYork, "2026-11-01", "2026-11-02", []int64{25}},
		{berlin, "2026-03-28", "2026-04-01", []int64{24, 23, 24, 24}},
	} {
		got := report(t, window(c.zone, c.from, c.to), nil, lease)
		var hours []int64
		for _, r := range got.Rows {
			hours = append(hours, r.GPUMs/hour)
		}
		if len(c.hours) == 1 && len(hours) > 1 {
			hours = []int64{got.Total.GPUMs / hour}
		}
		if !slices.Equal(hours, c.hours) {
			t.Errorf("%s %s to %s: %v hours, want %v", c.zone, c.from, c.to, hours, c.hours)
		}
	}
}

func TestHoursAfterLocalMidnightAreInTheLocalDay_ACCT04(t *testing.T) {
	for _, name := range []string{"Asia/Kolkata", "Asia/Kathmandu", "America/St_Johns", "Pacific/Auckland"} {
		z := zone(t, name)
		begin := time.Date(2026, 6, 10, 0, 30, 0, 0, z)
		lease := closed(1, begin, begin.Add(4*time.Hour+30*time.Minute))
		midnight := time.Date(2026, 6, 10, 0, 0, 0, 0, z)
		got := report(t, fleet.UsageQuery{By: usage.ByDay, From: midnight, Location: z, Now: begin.Add(6 * time.Hour)}, nil, lease)
		if len(got.Rows) != 1 || got.Rows[0].Key != "2026-06-10" || got.Rows[0].GPUMs != 4*hour+hour/2 {
			t.Errorf("%s: %+v, want 4.5 hours on 2026-06-10", name, got.Rows)
		}
		utc := report(t, fleet.UsageQuery{By: usage.ByDay, Now: begin.Add(6 * time.Hour)}, nil, lease)
		var sum int64
		for _, r := range utc.Rows {
			sum += r.GPUMs
		}
		if sum != got.Total.GPUMs || (name == "Asia/Kolkata" && utc.Rows[0].Key != "2026-06-09") {
			t.Errorf("%s: in UTC %+v", name, utc.Rows)
		}
	}
}

func TestDayBeginsWhereClocksChangeAtMidnight(t *testing.T) {
	beirut := zone(t, "Asia/Beirut") // 2026-03-29 begins at 01:00
	days := usage.Days(time.Date(2026, 3, 28, 12, 0, 0, 0, beirut), time.Date(2026, 3, 30, 12, 0, 0, 0, beirut), beirut)
	var hours []int64
	for i, d := range days {
		hours = append(hours, (d.To-d.From)/hour)
		if i > 0 && days[i-1].To != d.From {
			t.Errorf("day %s does not begin where %s ends", d.Name, days[i-1].Name)
		}
	}
	if !slices.Equal(hours, []int64{24, 23, 24}) {
		t.Errorf("hours %v of %+v", hours, days)
	}
	apia := zone(t, "Pacific/Apia") // skipped 2011-12-30
	days = usage.Days(time.Date(2011, 12, 29, 1, 0, 0, 0, apia), time.Date(2012, 1, 1, 0, 0, 0, 0, apia), apia)
	if len(days) != 2 || days[1].Name != "2011-12-31" || days[0].To != days[1].From {
		t.Errorf("skipped day: %+v", days)
	}
}

func TestLateEndNeedsNoCorrection_D2(t *testing.T) {
	// Silent from 11:25, project changed at 12:00, exit at 11:30 learnt at 13:00.
	l := closed(1, at(t, "2026-05-01T10:00:00Z"), at(t, "2026-05-01T11:30:00Z"))
	other := l.Key
	other.Project = "vision"
	l.Changes = []usage.Change{{At: at(t, "2026-05-01T12:00:00Z").UnixMilli(), Key: other}}
	segments := l.Segments(at(t, "2026-05-01T13:00:00Z").UnixMilli())
	if len(segments) != 1 || segments[0].Key.Project != "default" || segments[0].To-segments[0].From != hour*3/2 {
		t.Errorf("segments %+v, want 90 minutes of default", segments)
	}
}

func TestRowsThatCrossTheWindow_ACCT16(t *testing.T) {
	clock := func(h int) time.Time { return time.Date(2026, 5, 4, h, 0, 0, 0, time.UTC) }
	leases := []*usage.Lease{
		closed(1, clock(8), clock(10)), closed(2, clock(16), clock(18)), closed(3, clock(7), clock(19)), closed(4, clock(10), clock(11)),
		closed(5, time.Time{}, clock(11)), closed(6, clock(12), clock(11)), closed(7, clock(17), clock(18)),
	}
	leases[4].Start = 0
	got := report(t, fleet.UsageQuery{By: usage.ByLease, From: clock(9), To: clock(17), Now: clock(20)}, nil, leases...)
	want := map[string][2]int64{"1": {1, 2}, "2": {1, 2}, "3": {8, 12}, "4": {1, 1}, "5": {0, 0}, "6": {0, 0}}
	if len(got.Rows) != len(want) {
		t.Errorf("%d rows, want %d: %+v", len(got.Rows), len(want), got.Rows)
	}
	for _, r := range got.Rows {
		w, ok := want[r.Key[:1]]
		if !ok || r.GPUMs != w[0]*hour || r.FullMs != w[1]*hour {
			t.Errorf("row %+v, want clipped and full %v", r, w)
		}
		if r.Key[:1] == "5" && !r.Provisional {
			t.Error("a lease without a start is not flagged")
		}
	}
}

func TestOpenLeaseCountsToNowAndHasNoEnd_ACCT15(t *testing.T) {
	l := closed(1, at(t, "2026-01-31T20:00:00Z"), time.Time{})
	l.Open = true
	january := fleet.UsageQuery{By: usage.ByLease, From: at(t, "2026-01-01T00:00:00Z"), To: at(t, "2026-02-01T00:00:00Z")}
	january.Now = at(t, "2026-02-03T00:00:00Z")
	first := report(t, january, nil, l)
	january.Now = at(t, "2026-02-10T00:00:00Z")
	second := report(t, january, nil, l)
	if len(first.Rows) != 1 || len(second.Rows) != 1 || first.Rows[0] != second.Rows[0] || first.Total != second.Total {
		t.Errorf("closed month changed:\n%+v\n%+v", first, second)
	}
	if r := first.Rows[0]; r.GPUMs != 4*hour || !r.EndedAt.IsZero() {
		t.Errorf("row %+v, want 4 hours without an end", r)
	}
	february := report(t, fleet.UsageQuery{By: usage.ByLease, From: january.To, Now: january.Now}, nil, l)
	if r := february.Rows[0]; !r.Open || r.GPUMs != 9*24*hour || !r.EndedAt.IsZero() {
		t.Errorf("running row %+v, want open with 216 hours so far", r)
	}
}

func TestCostFollowsRatesWithValidity(t *testing.T) {
	begin := at(t, "2026-05-01T00:00:00Z")
	l := closed(1, begin, begin.Add(10*time.Hour))
	rates := []fleet.Rate{
		{Model: "*", MicrosPerHour: 1_000_000, Currency: "EUR", From: begin.Add(-time.Hour)},
		{Model: "4090", MicrosPerHour: 500_000, Currency: "EUR", From: begin.Add(2 * time.Hour)},
		{Model: "4090", MicrosPerHour: 250_000, Currency: "EUR", From: begin.Add(6 * time.Hour)},
	}
	got := report(t, fleet.UsageQuery{Now: begin.Add(24 * time.Hour)}, rates, l)
	if got.Total.CostMicros != 2*1_000_000+4*500_000+4*250_000 || got.Currency != "EUR" {
		t.Errorf("cost %d %s", got.Total.CostMicros, got.Currency)
	}
	l.Simulated = true
	if got := report(t, fleet.UsageQuery{Now: begin.Add(24 * time.Hour)}, rates, l); got.Total.CostMicros != 0 {
		t.Errorf("a simulated device costs %d", got.Total.CostMicros)
	}
	huge := []fleet.Rate{{Model: "*", MicrosPerHour: 1 << 62, From: time.UnixMilli(0)}}
	l.Simulated = false
	if got := report(t, fleet.UsageQuery{Now: begin.Add(24 * time.Hour)}, huge, l); got.Total.CostMicros <= 0 {
		t.Errorf("cost overflowed to %d", got.Total.CostMicros)
	}
}

// drawLeases draws leases with changes, activity and open ends within a few days.
func drawLeases(t *rapid.T, base, now int64) []*usage.Lease {
	count := rapid.IntRange(1, 8).Draw(t, "leases")
	leases := make([]*usage.Lease, 0, count)
	key := rapid.Custom(func(t *rapid.T) usage.Key {
		user := rapid.SampledFrom([]string{"ana", "bo"}).Draw(t, "user")
		return usage.Key{
			User: fleet.UserID(user), UserName: user, Project: rapid.SampledFrom([]string{"default", "vision", "audio"}).Draw(t, "project"),
			Pool: rapid.SampledFrom([]string{"p", "q"}).Draw(t, "pool"), Model: rapid.SampledFrom([]string{"4090", "H100", "A10"}).Draw(t, "model"),
		}
	})
	for i := range count {
		l := &usage.Lease{ID: int64(i + 1), Device: "GPU-x", Workspace: rapid.SampledFrom([]string{"ana/w1", "bo/w2"}).Draw(t, "workspace"), Key: key.Draw(t, "key")}
		l.Start = base + rapid.Int64Range(0, 80*hour).Draw(t, "start")
		l.End = l.Start + rapid.Int64Range(0, 60*hour).Draw(t, "length")
		l.Open = l.End > now || rapid.Bool().Draw(t, "open")
		for range rapid.IntRange(0, 3).Draw(t, "changes") {
			l.Changes = append(l.Changes, usage.Change{At: l.Start + rapid.Int64Range(0, 90*hour).Draw(t, "change at"), Key: key.Draw(t, "change")})
		}
		for h := l.Start - l.Start%hour; h < l.End; h += hour {
			a := rapid.Int64Range(0, hour).Draw(t, "active")
			l.Hours = append(l.Hours, usage.Hour{Start: h, ActiveMs: a, IdleMs: rapid.Int64Range(0, hour-a).Draw(t, "idle")})
		}
		leases = append(leases, l)
	}
	return leases
}

func build(t *rapid.T, q fleet.UsageQuery, rates []fleet.Rate, leases []*usage.Lease) fleet.UsageReport {
	r, err := usage.NewReport(q, usage.NewRates(rates))
	if err != nil {
		t.Fatal(err)
	}
	r.Begin(leases[0].Start)
	first := leases[0].Start
	for _, l := range leases {
		first = min(first, l.Start)
	}
	r.Begin(first)
	for _, l := range leases {
		r.Add(l)
	}
	return r.Finish()
}

func sums(r fleet.UsageRow) [5]int64 {
	return [5]int64{r.GPUMs, r.ActiveMs, r.IdleMs, r.UnknownMs, r.CostMicros}
}

func TestSumsAgreeOverGroupingsAndWindows(t *testing.T) {
	base := time.Date(2026, 3, 27, 0, 0, 0, 0, time.UTC)
	groupings := []string{usage.ByUser, usage.ByProject, usage.ByPool, usage.ByModel, usage.ByWorkspace, usage.ByDay, usage.ByLease}
	zones := []*time.Location{time.UTC, zone(t, "Europe/Berlin"), zone(t, "Asia/Kathmandu"), zone(t, "America/St_Johns")}
	rapid.Check(t, func(t *rapid.T) {
		now := base.Add(time.Duration(rapid.Int64Range(1, 150*hour).Draw(t, "now")) * time.Millisecond)
		leases := drawLeases(t, base.UnixMilli(), now.UnixMilli())
		var rates []fleet.Rate
		for range rapid.IntRange(0, 4).Draw(t, "rates") {
			rates = append(rates, fleet.Rate{
				Model: rapid.SampledFrom([]string{"*", "4090", "H100"}).Draw(t, "rate model"), MicrosPerHour: rapid.Int64Range(0, 9_999_999).Draw(t, "micros"),
				From: base.Add(time.Duration(rapid.Int64Range(-hour, 100*hour).Draw(t, "rate from")) * time.Millisecond),
			})
		}
		cuts := rapid.SliceOfN(rapid.Int64Range(-10*hour, 170*hour), 3, 3).Draw(t, "cuts")
		slices.Sort(cuts)
		moment := func(i int) time.Time { return base.Add(time.Duration(cuts[i]) * time.Millisecond) }
		q := fleet.UsageQuery{From: moment(0), To: moment(2), Now: now, Location: rapid.SampledFrom(zones).Draw(t, "zone")}
		whole := build(t, q, rates, leases)
		for _, by := range groupings {
			q.By = by
			got := build(t, q, rates, leases)
			var total [5]int64
			for _, r := range got.Rows {
				for i, v := range sums(r) {
					if v < 0 {
						t.Fatalf("by %s: negative %+v", by, r)
					}
					total[i] += v
				}
			}
			if total != sums(whole.Total) || sums(got.Total) != total {
				t.Fatalf("by %s: rows sum to %v, report's total %v, by user %v", by, total, sums(got.Total), sums(whole.Total))
			}
			if got.Total.ActiveMs+got.Total.IdleMs+got.Total.UnknownMs != got.Total.GPUMs {
				t.Fatalf("active, idle and unknown are not all: %+v", got.Total)
			}
		}
		q.By = usage.ByUser
		first, second := q, q
		first.To, second.From = moment(1), moment(1)
		a, b := sums(build(t, first, rates, leases).Total), sums(build(t, second, rates, leases).Total)
		for i := range a {
			if a[i]+b[i] != sums(whole.Total)[i] {
				t.Fatalf("windows do not add up: %v and %v, whole %v", a, b, sums(whole.Total))
			}
		}
	})
}

func TestSegmentsCoverTheLeaseExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := int64(200 * hour)
		for _, l := range drawLeases(t, 1, now) {
			end := l.End
			if l.Open {
				end = max(now, l.Start)
			}
			at := l.Start
			for _, s := range l.Segments(now) {
				if s.From != at || s.To < s.From {
					t.Fatalf("segments leave a gap or overlap at %d: %+v", at, l.Segments(now))
				}
				at = s.To
			}
			if at != end {
				t.Fatalf("segments end at %d, the lease at %d", at, end)
			}
		}
	})
}

func TestBadQuestionsSayWhatToChange(t *testing.T) {
	for _, q := range []fleet.UsageQuery{
		{By: "colour"},
		{From: time.UnixMilli(20), To: time.UnixMilli(10)},
	} {
		if _, err := usage.NewReport(q, usage.NewRates(nil)); !fleet.IsKind(err, fleet.KindInvalid) {
			t.Errorf("%+v: %v", q, err)
		}
	}
}
