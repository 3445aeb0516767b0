package sqlite

import (
	"context"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// largestRate bounds a rate so that sums of costs stay far from the largest number: a thousand million units per device-hour.
const largestRate = 1_000_000_000_000_000

// Rates returns all rates, newest first.
func (db *DB) Rates(ctx context.Context) (rates []fleet.Rate, err error) {
	err = db.read(ctx, func(t *tx) error {
		rates, err = t.rates()
		return err
	})
	return rates, err
}

func (t *tx) rates() ([]fleet.Rate, error) {
	return all(t, scanWith(func(r *fleet.Rate) []any { return []any{&r.Model, timeInto{&r.From}, &r.MicrosPerHour, &r.Currency} }),
		`SELECT model, valid_from, micros_per_hour, currency FROM rate ORDER BY valid_from DESC, model`)
}

// AddRate adds a row: the model costs this from its From on (now when zero) until the model's next row. All rows have one currency.
// KindExists when the model has a row from that moment.
func (db *DB) AddRate(ctx context.Context, rate fleet.Rate, now time.Time) (fleet.Rate, error) {
	switch {
	case rate.Model == "":
		return rate, fleet.Errorf(fleet.KindInvalid, "a rate needs a model, or `*` for all without a rate of their own")
	case rate.MicrosPerHour < 0 || rate.MicrosPerHour > largestRate:
		return rate, fleet.Errorf(fleet.KindInvalid, "rate of %s: use 0 to %d millionths per device-hour", clip(rate.Model), int64(largestRate))
	case len(rate.Currency) != 3:
		return rate, fleet.Errorf(fleet.KindInvalid, "currency %q: use three letters, such as EUR", clip(rate.Currency))
	}
	err := db.write(ctx, now, func(t *tx) error {
		if rate.From.IsZero() {
			rate.From = fromMillis(t.now)
		}
		rate.From = fromMillis(millis(rate.From))
		var other string
		err := t.row(`SELECT currency FROM rate WHERE currency <> ? LIMIT 1`, rate.Currency).Scan(&other)
		if err == nil {
			return fleet.Errorf(fleet.KindConflict, "this deployment's rates are in %s; use that currency", other)
		}
		if !isNoRows(err) {
			return err
		}
		err = t.exec(`INSERT INTO rate (model, valid_from, micros_per_hour, currency) VALUES (?, ?, ?, ?)`, rate.Model, millis(rate.From), rate.MicrosPerHour, rate.Currency)
		if isUnique(err) {
			return fleet.Errorf(fleet.KindExists, "%s has a rate from %s already", rate.Model, rate.From.Format(time.RFC3339))
		}
		return err
	})
	return rate, err
}
