package usage

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// The groupings of a report.
const (
	ByUser      = "user"
	ByProject   = "project"
	ByPool      = "pool"
	ByModel     = "model"
	ByWorkspace = "workspace"
	ByDay       = "day"
	ByLease     = "lease"
)

// Report sums leases in a window.
type Report struct {
	query    fleet.UsageQuery
	from, to int64
	now      int64
	rates    *Rates
	days     []Day
	rows     map[string]*row
	total    row
}

type row struct {
	fleet.UsageRow
	last  int64 // lease that was counted last
	order int64
}

// NewReport checks the question. No To means now; no From the beginning.
func NewReport(q fleet.UsageQuery, rates *Rates) (*Report, error) {
	if q.Location == nil {
		q.Location = time.UTC
	}
	if q.By == "" {
		q.By = ByUser
	}
	if !slices.Contains([]string{ByUser, ByProject, ByPool, ByModel, ByWorkspace, ByDay, ByLease}, q.By) {
		return nil, fleet.Errorf(fleet.KindInvalid, "usage by %q: use user, project, pool, model, workspace, day or lease", q.By)
	}
	if q.To.IsZero() {
		q.To = q.Now
	}
	if q.From.After(q.To) {
		return nil, fleet.Errorf(fleet.KindInvalid, "the window ends before it begins: from %s to %s", q.From.Format(time.RFC3339), q.To.Format(time.RFC3339))
	}
	r := &Report{query: q, to: q.To.UnixMilli(), now: q.Now.UnixMilli(), rates: rates, rows: map[string]*row{}}
	if !q.From.IsZero() {
		r.from = q.From.UnixMilli()
	}
	return r, nil
}

// Window returns the window in unix milliseconds: [from, to).
func (r *Report) Window() (from, to int64) { return r.from, r.to }

// Splits reports whether the report needs a lease's hours: where the window, a day or a change cuts it.
func (r *Report) Splits(l *Lease) bool {
	return r.query.By == ByDay || len(l.Changes) > 0 || l.Start < r.from || l.end(r.now) > r.to
}

// Begin sets the days of a report by day; first is the beginning of the oldest lease, for a window without a beginning.
func (r *Report) Begin(first int64) {
	if r.query.By != ByDay {
		return
	}
	from := max(r.from, first)
	until := min(r.to, max(r.now, from))
	if until == from {
		until++ // the day of an empty window
	}
	r.days = Days(time.UnixMilli(from), time.UnixMilli(until), r.query.Location)
	for i, d := range r.days {
		r.rows[d.Name] = &row{UsageRow: fleet.UsageRow{Key: d.Name}, order: int64(i)}
	}
}

// Add counts a lease.
func (r *Report) Add(l *Lease) {
	if l.Start <= 0 { // a row that no Carrel wrote: shown, and not billed
		if r.query.By == ByLease {
			r.rows[leaseKey(l)] = &row{UsageRow: fleet.UsageRow{Key: leaseKey(l), Leases: 1, Provisional: true}}
		}
		return
	}
	for _, s := range l.Segments(r.now) {
		from, to := max(s.From, r.from), min(s.To, r.to)
		touches := from < to || (s.From == s.To && from == to && from < r.to)
		if !touches || !r.wants(s.Key) {
			continue
		}
		if r.query.By != ByDay {
			r.count(r.row(l, s.Key), l, s, from, to)
			continue
		}
		first, _ := slices.BinarySearchFunc(r.days, from, func(d Day, at int64) int { return cmp.Compare(d.To, at+1) })
		for _, d := range r.days[first:] {
			if d.From >= to && d.From > from {
				break
			}
			r.count(r.rows[d.Name], l, s, max(from, d.From), min(to, d.To))
		}
	}
}

func (r *Report) wants(k Key) bool {
	q := &r.query
	return (q.User == "" || q.User == k.User) && (q.Project == "" || q.Project == k.Project) && (q.Pool == "" || q.Pool == k.Pool)
}

func leaseKey(l *Lease) string { return fmt.Sprintf("%d %s %s", l.ID, l.Workspace, l.Device) }

func (r *Report) row(l *Lease, k Key) *row {
	var key string
	switch r.query.By {
	case ByUser:
		key = k.UserName
	case ByProject:
		key = k.Project
	case ByPool:
		key = k.Pool
	case ByModel:
		key = k.Model
	case ByWorkspace:
		key = l.Workspace
	case ByLease:
		key = leaseKey(l)
	}
	found := r.rows[key]
	if found == nil {
		found = &row{UsageRow: fleet.UsageRow{Key: key}, order: l.Start}
		r.rows[key] = found
	}
	if r.query.By == ByLease {
		r.showWhole(found, l)
	}
	return found
}

// showWhole fills in the unclipped lease. An open one counts to the earlier of now and the window's end, so that a closed month says
// the same whenever it is asked for.
func (r *Report) showWhole(to *row, l *Lease) {
	to.StartedAt = time.UnixMilli(l.Start).UTC()
	to.FullMs = l.end(r.now) - l.Start
	if l.Open {
		to.FullMs = max(min(r.now, r.to)-l.Start, 0)
	} else {
		to.EndedAt = time.UnixMilli(l.End).UTC()
	}
}

// count adds [from, to) of a lease's segment to a row and to the total.
func (r *Report) count(to *row, l *Lease, s Segment, from, until int64) {
	active, idle := l.activity(from, until, r.now)
	var cost int64
	if !l.Simulated {
		cost = r.rates.Cost(s, from, until)
	}
	for _, sum := range []*row{to, &r.total} {
		sum.GPUMs += until - from
		sum.ActiveMs += active
		sum.IdleMs += idle
		sum.UnknownMs += until - from - active - idle
		sum.CostMicros = addCapped(sum.CostMicros, cost)
		if sum.last != l.ID || sum.Leases == 0 {
			sum.Leases++
			sum.last = l.ID
		}
		// Open in a window means that it still grows there: the window has not ended yet.
		sum.Open = sum.Open || (l.Open && r.to >= r.now)
		sum.Provisional = sum.Provisional || l.Provisional
	}
}

// Finish returns the rows, largest first, days and leases in order of time.
func (r *Report) Finish() fleet.UsageReport {
	rows := make([]*row, 0, len(r.rows))
	for _, v := range r.rows {
		rows = append(rows, v)
	}
	slices.SortFunc(rows, func(a, b *row) int {
		if r.query.By == ByDay || r.query.By == ByLease {
			return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.last, b.last), cmp.Compare(a.Key, b.Key))
		}
		return cmp.Or(cmp.Compare(b.GPUMs, a.GPUMs), cmp.Compare(a.Key, b.Key))
	})
	report := fleet.UsageReport{Total: r.total.UsageRow, From: r.query.From, To: r.query.To, Currency: r.rates.Currency()}
	report.Total.Key = "total"
	for _, v := range rows {
		report.Rows = append(report.Rows, v.UsageRow)
	}
	return report
}
