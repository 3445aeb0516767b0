package command

import (
	"fmt"
	"regexp"
	"strconv"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type rateView struct {
	Model         string  `json:"model"`
	MicrosPerHour int64   `json:"micros_per_hour"`
	Currency      string  `json:"currency"`
	From          *moment `json:"from"`
}

func viewRate(r *carrelv1.Rate) rateView {
	return rateView{r.GetModel(), r.GetMicrosPerHour(), r.GetCurrency(), momentOf(r.GetFrom())}
}

func newRate(a *app) *cobra.Command {
	return group("rate", "What a GPU-hour of each model costs", newRateList(a), newRateSet(a))
}

func newRateList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List rates, newest first", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.usage.ListRates(cmd.Context(), connect.NewRequest(&carrelv1.ListRatesRequest{}))
			if err != nil {
				return err
			}
			return writeList(a, rateList(), each(resp.Msg.GetRates(), viewRate), o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

// each maps a slice.
func each[T, V any](in []T, view func(T) V) []V {
	out := make([]V, len(in))
	for i, v := range in {
		out[i] = view(v)
	}
	return out
}

func rateList() output.List[rateView] {
	type col = output.Column[rateView]
	return output.List[rateView]{
		Columns: []col{
			{Name: "model", Title: "MODEL", Text: func(r rateView) string { return r.Model }},
			{Name: "micros_per_hour", Title: "PER HOUR", Right: true, Text: func(r rateView) string { return output.Micros(r.MicrosPerHour, 6) }, Value: func(r rateView) string { return fmt.Sprint(r.MicrosPerHour) }},
			{Name: "currency", Title: "CURRENCY", Text: func(r rateView) string { return r.Currency }},
			{Name: "from", Title: "FROM", Text: func(r rateView) string { return r.From.stamp() }, Value: func(r rateView) string { return r.From.text() }},
		},
		ID:    func(r rateView) string { return r.Model },
		Empty: "no rates; `carrel rate set MODEL PRICE --currency EUR` adds one",
	}
}

func newRateSet(a *app) *cobra.Command {
	var currency, from, tz string
	cmd := &cobra.Command{
		Use:     "set MODEL PRICE",
		Short:   "Add a rate: the price of a GPU-hour of a model from a moment on (admins); MODEL `*` is for all others",
		Example: "  carrel rate set 4090 0.45 --currency EUR --from 2026-04-01",
		Args:    exactArgs("MODEL", "PRICE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			micros, err := parseMicros(args[1])
			if err != nil {
				return err
			}
			rate := &carrelv1.Rate{Model: args[0], MicrosPerHour: micros, Currency: currency}
			if from != "" {
				zone, err := parseZone(tz, a.sys.Getenv)
				if err != nil {
					return err
				}
				t, err := parseMoment("--from", from, zone)
				if err != nil {
					return err
				}
				rate.From = timestamppb.New(t)
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.usage.SetRate(cmd.Context(), connect.NewRequest(&carrelv1.SetRateRequest{Rate: rate}))
			if err != nil {
				return err
			}
			r := viewRate(resp.Msg.GetRate())
			return a.print("%s: %s %s per hour from %s", r.Model, output.Micros(r.MicrosPerHour, 6), r.Currency, r.From.stamp())
		},
	}
	cmd.Flags().StringVar(&currency, "currency", "", "ISO 4217 `CODE`, the same for all rates (default: that of the others)")
	cmd.Flags().StringVar(&from, "from", "", "from when on, as in `usage` (default: now)")
	cmd.Flags().StringVar(&tz, "tz", "", "zone of --from (default: this machine's)")
	return cmd
}

var pricePattern = regexp.MustCompile(`^([0-9]{1,9})(?:\.([0-9]{1,6}))?$`)

// parseMicros reads a price in whole currency units exactly.
func parseMicros(s string) (int64, error) {
	m := pricePattern.FindStringSubmatch(s)
	if m == nil {
		return 0, usagef("price %q: use a number with up to six decimals, such as 0.45", s)
	}
	n, err := strconv.ParseInt(m[1]+(m[2] + "000000")[:6], 10, 64)
	if err != nil {
		return 0, usagef("price %q: %v", s, err)
	}
	return n, nil
}
