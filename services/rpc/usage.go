package rpc

import (
	"context"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/fleet"
)

// UsageStore reads the ledger and keeps rates.
type UsageStore interface {
	Report(ctx context.Context, query fleet.UsageQuery) (fleet.UsageReport, error)
	CheckLedger(ctx context.Context, now time.Time) (leases int64, differences []string, err error)
	Rates(ctx context.Context) ([]fleet.Rate, error)
	AddRate(ctx context.Context, rate fleet.Rate, now time.Time) (fleet.Rate, error)
	UserByName(ctx context.Context, name string) (fleet.User, error)
	FindWorkspace(ctx context.Context, owner fleet.UserID, ref string) (fleet.Workspace, error)
}

// Usage serves UsageService.
type Usage struct {
	Store UsageStore
	Now   func() time.Time
}

var _ carrelv1connect.UsageServiceHandler = (*Usage)(nil)

var groupNames = map[carrelv1.UsageGroup]string{
	carrelv1.UsageGroup_USAGE_GROUP_UNSPECIFIED: "user",
	carrelv1.UsageGroup_USAGE_GROUP_USER:        "user",
	carrelv1.UsageGroup_USAGE_GROUP_PROJECT:     "project",
	carrelv1.UsageGroup_USAGE_GROUP_POOL:        "pool",
	carrelv1.UsageGroup_USAGE_GROUP_MODEL:       "model",
	carrelv1.UsageGroup_USAGE_GROUP_WORKSPACE:   "workspace",
	carrelv1.UsageGroup_USAGE_GROUP_DAY:         "day",
	carrelv1.UsageGroup_USAGE_GROUP_LEASE:       "lease",
}

// Report sums device time in a window.
func (u *Usage) Report(ctx context.Context, req *connect.Request[carrelv1.ReportRequest]) (*connect.Response[carrelv1.ReportResponse], error) {
	query, err := u.query(ctx, req.Msg)
	if err != nil {
		return nil, err
	}
	report, err := u.Store.Report(ctx, query)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ReportResponse{
		Total: usageOnWire(report.Total), From: stamp(report.From), To: stamp(report.To), TimeZone: query.Location.String(), Currency: report.Currency,
	}
	for _, row := range report.Rows {
		res.Rows = append(res.Rows, usageOnWire(row))
	}
	return connect.NewResponse(res), nil
}

func (u *Usage) query(ctx context.Context, m *carrelv1.ReportRequest) (fleet.UsageQuery, error) {
	q := fleet.UsageQuery{Now: u.Now(), Project: m.GetProject(), Pool: m.GetPool(), Location: time.UTC}
	var ok bool
	if q.By, ok = groupNames[m.GetBy()]; !ok {
		return q, fleet.Errorf(fleet.KindInvalid, "this gateway does not know grouping %d; it may be older than the client", m.GetBy())
	}
	var err error
	if zone := m.GetTimeZone(); zone != "" {
		if q.Location, err = time.LoadLocation(zone); err != nil || zone == "Local" {
			return q, fleet.Errorf(fleet.KindInvalid, "time zone %q is not known; use an IANA name such as Europe/Berlin", zone)
		}
	}
	if err := u.window(&q, m); err != nil {
		return q, err
	}
	actor := actorOf(ctx)
	switch {
	case !actor.Admin():
		if name := m.GetUser(); name != "" && name != actor.User.Name {
			return q, fleet.Errorf(fleet.KindForbidden, "only an admin may see another user's usage")
		}
		q.User = actor.User.ID
	case m.GetUser() != "":
		user, err := u.Store.UserByName(ctx, m.GetUser())
		if err != nil {
			return q, err
		}
		q.User = user.ID
	}
	if ref := m.GetWorkspace(); ref != "" {
		owner, rest, err := ownerOf(ctx, u.Store, actor, ref)
		if err != nil {
			return q, err
		}
		w, err := u.Store.FindWorkspace(ctx, owner, rest)
		if err != nil {
			return q, err
		}
		q.Workspace = w.ID
	}
	return q, nil
}

func (u *Usage) window(q *fleet.UsageQuery, m *carrelv1.ReportRequest) error {
	var err error
	if q.From, err = timeOf("from", m.GetFrom()); err != nil {
		return err
	}
	if q.To, err = timeOf("to", m.GetTo()); err != nil {
		return err
	}
	if q.To.IsZero() {
		q.To = q.Now
	}
	if q.From.IsZero() {
		local := q.Now.In(q.Location)
		q.From = time.Date(local.Year(), local.Month(), 1, 0, 0, 0, 0, q.Location)
	}
	if !q.From.Before(q.To) {
		return fleet.Errorf(fleet.KindInvalid, "the window is empty: it begins at %s and ends at %s", q.From.In(q.Location).Format(time.RFC3339), q.To.In(q.Location).Format(time.RFC3339))
	}
	return nil
}

// Check recomputes the ledger.
func (u *Usage) Check(ctx context.Context, _ *connect.Request[carrelv1.CheckRequest]) (*connect.Response[carrelv1.CheckResponse], error) {
	leases, differences, err := u.Store.CheckLedger(ctx, u.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CheckResponse{Leases: leases, Differences: differences}), nil
}

// ListRates returns all rates, newest first.
func (u *Usage) ListRates(ctx context.Context, _ *connect.Request[carrelv1.ListRatesRequest]) (*connect.Response[carrelv1.ListRatesResponse], error) {
	rates, err := u.Store.Rates(ctx)
	if err != nil {
		return nil, err
	}
	res := &carrelv1.ListRatesResponse{}
	for _, r := range rates {
		res.Rates = append(res.Rates, rateOnWire(r))
	}
	return connect.NewResponse(res), nil
}

// SetRate adds a rate.
func (u *Usage) SetRate(ctx context.Context, req *connect.Request[carrelv1.SetRateRequest]) (*connect.Response[carrelv1.SetRateResponse], error) {
	wire := req.Msg.GetRate()
	from, err := timeOf("from", wire.GetFrom())
	if err != nil {
		return nil, err
	}
	if from.IsZero() {
		from = u.Now()
	}
	switch {
	case wire.GetModel() == "":
		return nil, fleet.Errorf(fleet.KindInvalid, "say which model the rate is for, or `*` for all without one")
	case wire.GetMicrosPerHour() < 0:
		return nil, fleet.Errorf(fleet.KindInvalid, "a rate must not be negative")
	case len(wire.GetCurrency()) != 3:
		return nil, fleet.Errorf(fleet.KindInvalid, "currency %q must be an ISO 4217 code of three letters, such as EUR", wire.GetCurrency())
	}
	rate, err := u.Store.AddRate(ctx, fleet.Rate{Model: wire.GetModel(), MicrosPerHour: wire.GetMicrosPerHour(), Currency: wire.GetCurrency(), From: from}, u.Now())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.SetRateResponse{Rate: rateOnWire(rate)}), nil
}

func rateOnWire(r fleet.Rate) *carrelv1.Rate {
	return &carrelv1.Rate{Model: r.Model, MicrosPerHour: r.MicrosPerHour, Currency: r.Currency, From: stamp(r.From)}
}

func usageOnWire(r fleet.UsageRow) *carrelv1.UsageRow {
	return &carrelv1.UsageRow{
		Key: r.Key, GpuMs: r.GPUMs, ActiveMs: r.ActiveMs, IdleMs: r.IdleMs, UnknownMs: r.UnknownMs, CostMicros: r.CostMicros, Leases: int32(r.Leases),
		Open: r.Open, Provisional: r.Provisional, StartedAt: stamp(r.StartedAt), EndedAt: stamp(r.EndedAt), FullMs: r.FullMs,
	}
}
