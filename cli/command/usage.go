package command

import (
	"context"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

// usageView is a report in `-o json`.
type usageView struct {
	From     *moment    `json:"from"`
	To       *moment    `json:"to"`
	TimeZone string     `json:"time_zone"`
	By       string     `json:"by"`
	Currency string     `json:"currency"`
	Rows     []usageRow `json:"rows"`
	Total    usageRow   `json:"total"`
}

type usageRow struct {
	Key         string  `json:"key"`
	GPUMs       int64   `json:"gpu_ms"`
	GPUHours    string  `json:"gpu_hours"`
	ActiveMs    int64   `json:"active_ms"`
	IdleMs      int64   `json:"idle_ms"`
	UnknownMs   int64   `json:"unknown_ms"`
	CostMicros  int64   `json:"cost_micros"`
	Leases      int32   `json:"leases"`
	Open        bool    `json:"open"`
	Provisional bool    `json:"provisional"`
	StartedAt   *moment `json:"started_at,omitempty"`
	EndedAt     *moment `json:"ended_at,omitempty"`
	FullMs      int64   `json:"full_ms,omitempty"`
}

func viewUsage(r *carrelv1.UsageRow) usageRow {
	return usageRow{
		Key: r.GetKey(), GPUMs: r.GetGpuMs(), GPUHours: output.Hours(r.GetGpuMs()), ActiveMs: r.GetActiveMs(), IdleMs: r.GetIdleMs(), UnknownMs: r.GetUnknownMs(),
		CostMicros: r.GetCostMicros(), Leases: r.GetLeases(), Open: r.GetOpen(), Provisional: r.GetProvisional(),
		StartedAt: momentOf(r.GetStartedAt()), EndedAt: momentOf(r.GetEndedAt()), FullMs: r.GetFullMs(),
	}
}

type usageOptions struct {
	listFlags
	window
	by                             string
	user, project, pool, workspace string
}

func newUsage(a *app) *cobra.Command {
	o := usageOptions{}
	cmd := &cobra.Command{
		Use:   "usage",
		Short: "GPU-hours, active and idle, and their cost",
		Long: `GPU time of a window, from the leases in the ledger; active and idle from samples. Without --from, --month or --day: this month
so far. Dates are in the zone of --tz (this machine's without it); the end is not included.`,
		Example: `  carrel usage --by user --month 2026-03
  carrel usage --by day --from 2026-03-01 --to 2026-04-01 --tz Europe/Berlin -o csv`,
		Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.usage(cmd.Context(), o)
		},
	}
	a.listFlags(cmd, &o.listFlags)
	o.register(cmd)
	fl := cmd.Flags()
	fl.StringVar(&o.by, "by", "user", "`user`, project, pool, model, workspace, day or lease")
	fl.StringVar(&o.user, "user", "", "only this user's")
	fl.StringVar(&o.project, "project", "", "only this project's")
	fl.StringVar(&o.pool, "pool", "", "only this pool's")
	fl.StringVar(&o.workspace, "workspace", "", "only this workspace's")
	cmd.AddCommand(newUsageCheck(a))
	return cmd
}

var usageGroups = []string{"user", "project", "pool", "model", "workspace", "day", "lease"}

func parseGroup(s string) (carrelv1.UsageGroup, error) {
	n, ok := carrelv1.UsageGroup_value["USAGE_GROUP_"+strings.ToUpper(s)]
	if !ok || n == 0 {
		return 0, usagef("--by %q: use %s", s, strings.Join(usageGroups, ", "))
	}
	return carrelv1.UsageGroup(n), nil
}

func (a *app) usage(ctx context.Context, o usageOptions) error {
	by, err := parseGroup(o.by)
	if err != nil {
		return err
	}
	if err := a.early(o.listFlags); err != nil {
		return err
	}
	from, to, zone, err := o.resolve(a.sys.Now(), a.sys.Getenv)
	if err != nil {
		return err
	}
	req := &carrelv1.ReportRequest{By: by, TimeZone: zone.String(), User: o.user, Project: o.project, Pool: o.pool, Workspace: o.workspace}
	req.From = timestamppb.New(from)
	if !to.IsZero() {
		req.To = timestamppb.New(to)
	}
	api, err := a.connect()
	if err != nil {
		return err
	}
	resp, err := api.usage.Report(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	return a.writeUsage(resp.Msg, o, zone)
}

func (a *app) writeUsage(r *carrelv1.ReportResponse, o usageOptions, zone *time.Location) error {
	f, err := a.format(o.format)
	if err != nil {
		return err
	}
	v := usageView{
		From: momentOf(r.GetFrom()), To: momentOf(r.GetTo()), TimeZone: r.GetTimeZone(), By: o.by, Currency: r.GetCurrency(),
		Rows: []usageRow{}, Total: viewUsage(r.GetTotal()),
	}
	for _, row := range r.GetRows() {
		v.Rows = append(v.Rows, viewUsage(row))
	}
	if f == output.JSON && !o.quiet {
		return output.WriteJSON(a.sys.Out, v)
	}
	if v.From != nil && v.To != nil {
		a.say("from %s to %s (%s)", v.From.In(zone).Format(time.RFC3339), v.To.In(zone).Format(time.RFC3339), zone)
	}
	rows := v.Rows
	if f == output.Table && !o.quiet {
		total := v.Total
		total.Key = "TOTAL"
		rows = append(rows, total)
	}
	return writeList(a, usageList(o.by, v.Currency), rows, o.listFlags)
}

func usageList(by, currency string) output.List[usageRow] {
	type col = output.Column[usageRow]
	hours := func(name, title string, ms func(usageRow) int64) col {
		return col{Name: name, Title: title, Right: true, Text: func(r usageRow) string { return output.Hours(ms(r)) }, Value: func(r usageRow) string { return fmt.Sprint(ms(r)) }}
	}
	cost := col{Name: "cost_micros", Text: func(r usageRow) string { return output.Micros(r.CostMicros, 2) }, Right: true, Value: func(r usageRow) string { return fmt.Sprint(r.CostMicros) }}
	if currency != "" {
		cost.Title = "COST " + currency
	}
	columns := []col{
		{Name: by, Title: strings.ToUpper(by), Text: func(r usageRow) string { return r.Key }},
		hours("gpu_ms", "GPU-HOURS", func(r usageRow) int64 { return r.GPUMs }),
		{Name: "gpu_hours", Text: func(r usageRow) string { return r.GPUHours }},
		hours("active_ms", "ACTIVE", func(r usageRow) int64 { return r.ActiveMs }),
		hours("idle_ms", "IDLE", func(r usageRow) int64 { return r.IdleMs }),
		hours("unknown_ms", "UNKNOWN", func(r usageRow) int64 { return r.UnknownMs }),
		cost,
		{Name: "currency", Text: func(usageRow) string { return currency }},
		{Name: "leases", Title: "LEASES", Right: true, Text: func(r usageRow) string { return fmt.Sprint(r.Leases) }},
		{Name: "open", Text: func(r usageRow) string { return fmt.Sprint(r.Open) }},
		{Name: "provisional", Text: func(r usageRow) string { return fmt.Sprint(r.Provisional) }},
		{Name: "note", Title: "NOTE", Text: usageRow.note},
	}
	if by == "lease" {
		columns = append(columns,
			col{Name: "started_at", Title: "STARTED", Text: func(r usageRow) string { return r.StartedAt.stamp() }, Value: func(r usageRow) string { return r.StartedAt.text() }},
			col{Name: "ended_at", Title: "ENDED", Text: func(r usageRow) string { return r.EndedAt.stamp() }, Value: func(r usageRow) string { return r.EndedAt.text() }},
			col{Name: "full_ms", Text: func(r usageRow) string { return fmt.Sprint(r.FullMs) }},
		)
	}
	return output.List[usageRow]{Columns: columns, ID: func(r usageRow) string { return r.Key }}
}

func (r usageRow) note() string {
	switch {
	case r.Provisional:
		return "provisional: a host does not answer"
	case r.Open:
		return "still counting"
	}
	return ""
}

type checkView struct {
	Leases      int64    `json:"leases"`
	Differences []string `json:"differences"`
}

func newUsageCheck(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use: "check", Short: "Recompute the ledger and tell each difference; fails where there is one (admins)", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.usage.Check(cmd.Context(), connect.NewRequest(&carrelv1.CheckRequest{}))
			if err != nil {
				return err
			}
			v := checkView{resp.Msg.GetLeases(), emptyIfNil(resp.Msg.GetDifferences())}
			pairs := [][2]string{{"leases", fmt.Sprint(v.Leases)}, {"differences", fmt.Sprint(len(v.Differences))}}
			for _, d := range v.Differences {
				pairs = append(pairs, [2]string{"", d})
			}
			if err := a.showOne(format, v, pairs); err != nil {
				return err
			}
			if len(v.Differences) > 0 {
				return said(exitFailure)
			}
			return nil
		},
	}
	a.formatFlag(cmd, &format)
	return cmd
}
