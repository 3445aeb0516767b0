package sqlite

import (
	"context"

	"github.com/carrel-dev/carrel/services/fleet"
	"github.com/carrel-dev/carrel/services/usage"
)

// Report sums device time in a window. All rows are read before the first is counted, so that a slow reader holds up nothing.
func (db *DB) Report(ctx context.Context, q fleet.UsageQuery) (report fleet.UsageReport, err error) {
	if q.Now.IsZero() {
		return report, fleet.Errorf(fleet.KindInvalid, "a usage report needs the present time")
	}
	var leases []usageRow
	var r *usage.Report
	err = db.read(ctx, func(t *tx) error {
		rates, err := t.rates()
		if err != nil {
			return err
		}
		if r, err = usage.NewReport(q, usage.NewRates(rates)); err != nil {
			return err
		}
		leases, err = t.usageRows(&q, r)
		return err
	})
	if err != nil {
		return report, err
	}
	first := millis(q.Now)
	for i := range leases {
		first = min(first, leases[i].Start)
	}
	r.Begin(first)
	for i := range leases {
		r.Add(&leases[i].Lease)
	}
	return r.Finish(), nil
}

// usageRow is a lease as stored, with what decides how it is completed.
type usageRow struct {
	usage.Lease
	changes   int
	sampledTo int64
}

const usageQuery = `SELECT lease.id, lease.device, lease.workspace, lease.host, lease.user, lease.project, lease.pool, lease.model, lease.started_at, lease.ended_at,
	lease.changes, lease_total.active_ms, lease_total.idle_ms, lease_total.sampled_to
	FROM lease LEFT JOIN lease_total ON lease_total.lease = lease.id`

// usageRows reads the leases that touch the report's window, complete.
func (t *tx) usageRows(q *fleet.UsageQuery, r *usage.Report) ([]usageRow, error) {
	names, err := t.usageNames(q)
	if err != nil {
		return nil, err
	}
	from, to := r.Window()
	var rows []usageRow
	take := func(s scanner) error {
		row, err := names.scan(s)
		if err == nil {
			rows = append(rows, row)
		}
		return err
	}
	// Open leases are few; ended ones are found by the index that fits the question.
	err = each(t, take, usageQuery+` WHERE lease.released_at IS NULL AND lease.started_at < ?1 AND (?2 = '' OR lease.user = ?2) AND (?3 = '' OR lease.workspace = ?3)`, to, q.User, q.Workspace)
	if err != nil {
		return nil, err
	}
	const ended = ` WHERE lease.ended_at IS NOT NULL AND lease.ended_at >= ?1 AND lease.started_at < ?2`
	switch {
	case q.Workspace != "":
		err = each(t, take, usageQuery+ended+` AND lease.workspace = ?3 AND (?4 = '' OR lease.user = ?4)`, from, to, q.Workspace, q.User)
	case q.User != "":
		err = each(t, take, usageQuery+ended+` AND lease.user = ?3`, from, to, q.User)
	default:
		err = each(t, take, usageQuery+ended, from, to)
	}
	if err != nil {
		return nil, err
	}
	if err := t.addChanges(rows, names); err != nil {
		return nil, err
	}
	return rows, t.addHours(rows, r, from, to, millis(q.Now))
}

// usageNames holds what ids stand for, read once per report.
type usageNames struct {
	users      map[string]string
	workspaces map[string]string // `owner/name`
	simulated  map[string]bool
	silent     map[string]bool // hosts that do not answer
	texts      map[string]string
}

func (t *tx) usageNames(q *fleet.UsageQuery) (*usageNames, error) {
	n := &usageNames{users: map[string]string{}, workspaces: map[string]string{}, simulated: map[string]bool{}, silent: map[string]bool{}, texts: map[string]string{}}
	pair := func(to map[string]string) func(scanner) error {
		return func(s scanner) error {
			var id, name string
			err := s.Scan(&id, &name)
			to[id] = name
			return err
		}
	}
	set := func(to map[string]bool) func(scanner) error {
		return func(s scanner) error {
			var id string
			err := s.Scan(&id)
			to[id] = true
			return err
		}
	}
	if err := each(t, pair(n.users), `SELECT id, name FROM user`); err != nil {
		return nil, err
	}
	if q.By == usage.ByWorkspace || q.By == usage.ByLease {
		err := each(t, pair(n.workspaces), `SELECT workspace.id, user.name || '/' || workspace.name FROM workspace JOIN user ON user.id = workspace.owner`)
		if err != nil {
			return nil, err
		}
	}
	if err := each(t, set(n.simulated), `SELECT id FROM device WHERE simulated = 1`); err != nil {
		return nil, err
	}
	return n, each(t, set(n.silent), `SELECT id FROM host WHERE fenced = 1 OR coalesce(last_seen, 0) < ?`, millis(q.Now)-t.db.opts.UnreachableAfter.Milliseconds())
}

// once keeps one copy of a text that many rows hold.
func (n *usageNames) once(s string) string {
	if kept, ok := n.texts[s]; ok {
		return kept
	}
	n.texts[s] = s
	return s
}

func (n *usageNames) scan(s scanner) (usageRow, error) {
	var r usageRow
	var workspace, host, user string
	var ended, active, idle, sampled *int64
	err := s.Scan(&r.ID, &r.Device, &workspace, &host, &user, &r.Key.Project, &r.Key.Pool, &r.Key.Model, &r.Start, &ended, &r.changes, &active, &idle, &sampled)
	if err != nil {
		return r, err
	}
	r.Workspace = n.workspaces[workspace]
	r.Key = usage.Key{User: fleet.UserID(n.once(user)), UserName: n.users[user], Project: n.once(r.Key.Project), Pool: n.once(r.Key.Pool), Model: n.once(r.Key.Model)}
	r.Device, r.Simulated = n.once(r.Device), n.simulated[r.Device]
	if r.Open = ended == nil; !r.Open {
		r.End = *ended
	}
	r.Provisional = r.Open && n.silent[host]
	if active != nil {
		r.ActiveMs, r.IdleMs, r.sampledTo = *active, *idle, *sampled
	}
	return r, nil
}

// addChanges reads the facts of leases that were billed to more than one key.
func (t *tx) addChanges(rows []usageRow, names *usageNames) error {
	index := map[int64]*usageRow{}
	var ids []int64
	for i := range rows {
		if rows[i].changes > 0 {
			index[rows[i].ID] = &rows[i]
			ids = append(ids, rows[i].ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return each(t, func(s scanner) error {
		var lease, at int64
		var kind fleet.FactKind
		var k usage.Key
		if err := s.Scan(&lease, &kind, &at, &k.User, &k.Project, &k.Pool, &k.Model); err != nil {
			return err
		}
		k.UserName = names.users[string(k.User)]
		if r := index[lease]; kind == fleet.FactOpen {
			r.Key = k
		} else {
			r.Changes = append(r.Changes, usage.Change{At: at, Key: k})
		}
		return nil
	}, `SELECT lease, kind, at, user, project, pool, model FROM ledger WHERE lease IN (SELECT value FROM json_each(?)) AND kind <> 'end' ORDER BY lease, id`, jsonArg(ids))
}

// addHours reads the hours of leases that the window, a day or a change cuts; of the others the totals say the same.
func (t *tx) addHours(rows []usageRow, r *usage.Report, from, to, now int64) error {
	index := map[int64]*usageRow{}
	var ids []int64
	for i := range rows {
		row := &rows[i]
		row.Whole = !r.Splits(&row.Lease) && (!row.Open || row.sampledTo <= now)
		if !row.Whole && row.sampledTo > 0 {
			index[row.ID] = row
			ids = append(ids, row.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	return each(t, func(s scanner) error {
		var lease int64
		var h usage.Hour
		err := s.Scan(&lease, &h.Start, &h.ActiveMs, &h.IdleMs)
		row := index[lease]
		row.Hours = append(row.Hours, h)
		return err
	}, `SELECT lease, hour, active_ms, idle_ms FROM lease_activity WHERE lease IN (SELECT value FROM json_each(?)) AND hour > ? AND hour < ? ORDER BY lease, hour`,
		jsonArg(ids), from-usage.HourMs, to)
}
